"""Which coefficients: Gram matrix or step number in, K numbers out. Nothing here sees a parameter."""
