"""Per-reward gradients and their products."""
