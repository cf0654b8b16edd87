"""Stage 5: the DiffusionNFT loss as an advantage-affine loss (docs/method.md, section 2).

    x_t = (1 - t) x0 + t e,   v = e - x0                                     forward process
    v+ = (1 - beta) v_old + beta v_theta                                     implicit positive policy
    v- = (1 + beta) v_old - beta v_theta                                     implicit negative policy
    L+- = mean_pixels (x0_hat+- - x0)^2 / w+-,   x0_hat = x_t - t v+-        in x0 space
    w+- = max(mean_pixels |x0_hat+- - x0|, 1e-5), detached                   adaptive weighting
    l(A) = (A_max / beta) (r L+ + (1 - r) L-),   r = 1/2 + A / (2 A_max)

r is affine in the clamped advantage A, so with |A| <= A_max

    l(A) = base + A * slope,   base = A_max / (2 beta) (L+ + L-),   slope = (L+ - L-) / (2 beta).

Everything after the loss needs only these two numbers per sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_WEIGHT = 1e-5


@dataclass(frozen=True)
class AffineLoss:
    """Per-sample losses that are affine in the clamped advantage: l(A) = base + A * slope."""

    base: Tensor
    """[N]: the same for every reward; its gradient is the shared part of the update."""
    slope: Tensor
    """[N]: what a unit of advantage adds."""


def nft_loss(
    v_theta: Tensor,
    v_old: Tensor,
    x0: Tensor,
    x_t: Tensor,
    t: Tensor,
    *,
    beta: float,
    adv_clip: float = 5.0,
) -> AffineLoss:
    """DiffusionNFT for predictions, clean and noised latents [N, ...] at times t [N] in [0, 1]."""
    v_theta, v_old, x0, x_t, t = map(_at_least_float32, (v_theta, v_old.detach(), x0, x_t, t))
    time = t.reshape(-1, *[1] * (x0.ndim - 1))
    positive = _x0_error((1 - beta) * v_old + beta * v_theta, x0, x_t, time)
    negative = _x0_error((1 + beta) * v_old - beta * v_theta, x0, x_t, time)
    return AffineLoss(
        base=adv_clip / (2 * beta) * (positive + negative),
        slope=(positive - negative) / (2 * beta),
    )


def _x0_error(velocity: Tensor, x0: Tensor, x_t: Tensor, time: Tensor) -> Tensor:
    """Adaptively weighted squared error of the clean latent that ``velocity`` implies: [N]."""
    error = (x_t - time * velocity) - x0
    pixels = tuple(range(1, error.ndim))
    weight = error.detach().abs().mean(pixels, dtype=torch.float64).clamp_min(MIN_WEIGHT).to(error.dtype)
    return (error**2).mean(pixels) / weight


def reference_divergence(v_theta: Tensor, v_ref: Tensor) -> Tensor:
    """KL to the reference model up to its factor: mean_pixels ||v_theta - v_ref||^2, per sample [N]."""
    difference = _at_least_float32(v_theta) - _at_least_float32(v_ref.detach())
    return (difference**2).mean(tuple(range(1, difference.ndim)))


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
