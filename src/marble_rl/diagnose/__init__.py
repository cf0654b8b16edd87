"""`marble diagnose`: what the gradients of a run say about its rewards, and about each way to combine them."""
