"""Settings of the loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from marble_rl.section import Section


class LossConfig(Section):
    """DiffusionNFT."""

    beta: PositiveFloat = 0.1
    """How far the implicit positive and negative policies lie from the old one (DiffusionNFT: 1 for one reward,
    0.1 for several)."""
    adv_clip: PositiveFloat = 5.0
    """A_max: each advantage is clamped to +-A_max before anything else happens to it."""
    kl_weight: NonNegativeFloat = 1e-4
    """Weight of the pull towards the model without adapter; 0 also saves its forward pass."""
    regularize_every: PositiveInt = 1
    """Lazy regularisation: this pull, and on refresh steps the one towards the old policy, on one in so many
    micro-batches with as many times the weight. The same update on average, with fewer forward and backward passes."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Train on the first part of the sampling timesteps (the last ones hardly carry noise)."""
    timesteps_per_sample: PositiveInt | None = None
    """How many of them to train each image on, drawn anew in each step; null trains on all."""
