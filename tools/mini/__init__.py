"""Trains the weights in `marble_rl/mini`: the autoencoder, the pipeline and the reward models."""
