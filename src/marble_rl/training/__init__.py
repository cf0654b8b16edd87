"""The training loop and its stages."""
