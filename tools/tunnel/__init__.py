"""The wind tunnel: the whole training loop on a small conditional flow, where one training takes seconds.

Rollout, rewards, advantages, NFT loss, gradients, balancing rules and update are the package's own; only the model and
the rewards are small. A new idea is tried here first, with many seeds, in several regimes (docs/tunnel.md).
"""
