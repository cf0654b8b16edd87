"""What a reward is, and how rewards are called."""
