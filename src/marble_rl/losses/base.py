"""Stage 5: what a loss is. A new loss is one class in one file (docs/adding_a_loss.md).

A loss here is affine in the clamped advantage of a sample:

    l(A) = base + A * slope

The later stages need only these two numbers per sample: the gradient of reward k is that of mean_i A_ki slope_i,
and the gradient of mean base is shared by all rewards (docs/method.md, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from marble_rl.section import Section, SectionClass


class LossSettings(Section):
    """What all losses have in common."""

    type: str
    adv_clip: PositiveFloat = 5.0
    """A_max: each advantage is clamped to +-A_max before anything else happens to it."""
    kl_weight: NonNegativeFloat = 1e-4
    """Weight of the KL term to the reference model (no adapter); 0 also saves its forward pass."""
    regularize_every: PositiveInt = 1
    """Lazy regularisation: for m, compute the KL term (in refreshes also base) on one in m micro-batches, times m.
    The same update in expectation, with fewer forward and backward passes."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Fraction of the sampling timesteps to train on, noisiest first, rounded down (the last have little noise)."""
    timesteps_per_sample: PositiveInt | None = None
    """Number of these timesteps to train each image on, drawn anew in each step; null trains on all."""

    @classmethod
    def describing(cls, tree: Any) -> SectionClass:
        from marble_rl.losses.registry import LOSSES

        return LOSSES.settings_for(tree) if cls is LossSettings else cls


@dataclass(frozen=True)
class AffineLoss:
    """Per-sample losses that are affine in the clamped advantage: l(A) = base + A * slope."""

    base: Tensor
    """[N]: the same for every reward; its gradient is the shared part of the update."""
    slope: Tensor
    """[N]: what a unit of advantage adds."""


@dataclass(frozen=True)
class Noised:
    """Clean latents of a rollout at one noise level each: x_t = (1 - t) x0 + t e."""

    x0: Tensor
    """[N, ...]"""
    noise: Tensor
    """[N, ...]: e"""
    x_t: Tensor
    """[N, ...]"""
    t: Tensor
    """[N] in [0, 1]"""


class Loss(ABC):
    """An advantage-affine loss."""

    Settings: ClassVar[type[LossSettings]]
    """Its section of the config"""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def levels(self, sigmas: Tensor) -> Tensor:
        """[M]: the noise levels to train on. ``sigmas`` [T + 1]: levels of the rollout, descending to 0."""
        noisy = sigmas[:-1]
        return noisy[: max(1, int(self.settings.timestep_fraction * len(noisy)))]

    def needs_old(self, on_policy: bool) -> bool:
        """Whether `terms` needs the old policy's prediction. ``on_policy``: the old and the trained policy are
        equal."""
        return False

    def base_has_gradient(self, on_policy: bool) -> bool:
        """Whether ``base`` has a gradient; if not, its backward pass is skipped."""
        return True

    @abstractmethod
    def terms(self, v_theta: Tensor, v_old: Tensor | None, sample: Noised) -> AffineLoss:
        """The loss of velocity predictions [N, ...] of the trained policy and, where `needs_old`, of the old one."""


def reference_divergence(v_theta: Tensor, v_ref: Tensor) -> Tensor:
    """KL to the reference model up to a constant factor: mean_pixels ||v_theta - v_ref||^2, per sample [N]."""
    difference = at_least_float32(v_theta) - at_least_float32(v_ref.detach())
    return (difference**2).mean(tuple(range(1, difference.ndim)))


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
