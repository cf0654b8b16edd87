"""Rewards: the protocol, the built-in ones, and how they are called."""
