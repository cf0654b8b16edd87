"""Balancing rules: how the rewards are combined, by their advantages or by the Gram matrix of their gradients."""
