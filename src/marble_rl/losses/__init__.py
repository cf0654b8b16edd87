"""Losses that are affine in the advantage, sample by sample."""
