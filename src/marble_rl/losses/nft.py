"""The DiffusionNFT loss as an advantage-affine loss (docs/method.md, section 2).

    x_t = (1 - t) x0 + t e,   v = e - x0                                     forward process
    v+ = (1 - beta) v_old + beta v_theta                                     implicit positive policy
    v- = (1 + beta) v_old - beta v_theta                                     implicit negative policy
    L+- = mean_pixels (x0_hat+- - x0)^2 / w+-,   x0_hat+- = x_t - t v+-      in x0 space
    w+- = max(mean_pixels |x0_hat+- - x0|, 1e-5), detached                   adaptive weighting
    l(A) = (A_max / beta) (r L+ + (1 - r) L-),   r = 1/2 + A / (2 A_max)

r is affine in the clamped advantage A, so with |A| <= A_max

    l(A) = base + A * slope,   base = A_max / (2 beta) (L+ + L-),   slope = (L+ - L-) / (2 beta).

On-policy v_old = v_theta: the old policy's forward pass is left out, and grad base = 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from marble_rl.devices import has_float64
from marble_rl.losses.base import AffineLoss, Loss, LossSettings, Noised, at_least_float32

MIN_WEIGHT = 1e-5


class NftSettings(LossSettings):
    """DiffusionNFT."""

    type: Literal["nft"] = "nft"
    beta: PositiveFloat = 0.1
    """How far the implicit positive and negative policies lie from the old one (DiffusionNFT: 1 for one reward,
    0.1 for several)."""


class Nft(Loss):
    Settings = NftSettings

    def needs_old(self, on_policy: bool) -> bool:
        return not on_policy

    def base_has_gradient(self, on_policy: bool) -> bool:
        return not on_policy

    def terms(self, v_theta: Tensor, v_old: Tensor | None, sample: Noised) -> AffineLoss:
        old = v_theta.detach() if v_old is None else v_old
        return nft_loss(
            v_theta, old, sample.x0, sample.x_t, sample.t, beta=self.settings.beta, adv_clip=self.settings.adv_clip
        )


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
    v_theta, v_old, x0, x_t, t = map(at_least_float32, (v_theta, v_old.detach(), x0, x_t, t))
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
    size = error.detach().abs()
    size = size if has_float64(error.device) else size.cpu()
    weight = size.mean(pixels, dtype=torch.float64).clamp_min(MIN_WEIGHT).to(error)
    return (error**2).mean(pixels) / weight
