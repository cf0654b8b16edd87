"""Stage 5: what a loss is. A new loss is one class in one file (docs/adding_a_loss.md).

A loss here is affine in the clamped advantage of a sample:

    l(A) = base + A * slope

The later stages need only these two numbers per sample: the gradient of reward k is that of mean_i A_ki slope_i,
and the gradient of mean base is shared by all rewards (docs/method.md, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from marble_rl.section import Section, SectionClass


class LossSettings(Section):
    """Settings of all losses."""

    type: str
    adv_clip: PositiveFloat = 5.0
    """A_max: advantages are clamped to +-A_max, those of each reward before a balancing rule combines them."""
    kl_weight: NonNegativeFloat = 1e-4
    """Weight of the KL term to the reference policy (the model without adapter). 0 also saves its forward pass."""
    regularize_every: PositiveInt = 1
    """Lazy regularisation: with m, one in m samples of each group has the KL term (in refreshes also base), multiplied
    by m. The expected update is the same, with fewer forward and backward passes."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Fraction of the sampling timesteps to train on, noisiest first; their number is rounded down."""
    timesteps_per_sample: PositiveInt | None = None
    """Number of these timesteps to train each image on, drawn anew in each step; null trains on all."""
    noise: Literal["sample", "group"] = "sample"
    """`sample`: every sample has noise and timesteps of its own, as in DiffusionNFT. `group`: the samples of a prompt
    group share them, and every second timestep has the noise of the one before with its sign reversed. Advantages
    of a group sum to zero, so what its samples have in common cancels."""

    @classmethod
    def describing(cls, tree: Any) -> SectionClass:
        from marble_rl.losses.registry import LOSSES

        return LOSSES.settings_for(tree) if cls is LossSettings else cls


@dataclass(frozen=True)
class AffineLoss:
    """Per-sample losses that are affine in the clamped advantage: l(A) = base + A * slope."""

    base: Tensor
    """[N]: the loss at advantage 0. It is the same for every reward; its gradient is the shared part of the update."""
    slope: Tensor
    """[N]: the derivative of the loss by the advantage."""


@dataclass(frozen=True)
class Noised:
    """Latents of a rollout with noise added, each at its own noise level: x_t = (1 - t) x0 + t e."""

    x0: Tensor
    """[N, ...]: clean latents"""
    noise: Tensor
    """[N, ...]: e"""
    x_t: Tensor
    """[N, ...]"""
    t: Tensor
    """[N] in [0, 1]: noise levels (sigma)"""


class Loss(ABC):
    """An advantage-affine loss."""

    Settings: ClassVar[type[LossSettings]]
    """Its section of the config"""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def levels(self, sigmas: Tensor) -> Tensor:
        """The noise levels to train on, some of ``sigmas`` [T + 1]: the noise levels of the rollout, descending to
        0."""
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
        """The losses of the trained policy's velocity predictions [N, ...]. ``v_old``: those of the old policy, if
        `needs_old` says so."""


def reference_divergence(v_theta: Tensor, v_ref: Tensor) -> Tensor:
    """KL to the reference model up to a constant factor: mean_pixels ||v_theta - v_ref||^2, per sample [N]."""
    difference = at_least_float32(v_theta) - at_least_float32(v_ref.detach())
    return (difference**2).mean(tuple(range(1, difference.ndim)))


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
