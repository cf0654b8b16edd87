"""Advantage-weighted flow matching: the flow-matching error of the policy's own samples, weighted by their advantage.

    l(A) = A * mean_pixels ||v_theta - v||^2,   v = e - x0

so base = 0 and slope is the flow-matching error (docs/method.md, section 3). A sample that is better than its group is
made more likely, a worse one less. Neither the old policy's prediction nor a backward pass for base is needed.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from marble_rl.losses.base import AffineLoss, Loss, LossSettings, Noised, at_least_float32


class AwmSettings(LossSettings):
    """Advantage-weighted flow matching."""

    type: Literal["awm"]


class Awm(Loss):
    Settings = AwmSettings

    def base_has_gradient(self, on_policy: bool) -> bool:
        return False

    def terms(self, v_theta: Tensor, v_old: Tensor | None, sample: Noised) -> AffineLoss:
        v_theta, x0, noise = map(at_least_float32, (v_theta, sample.x0, sample.noise))
        slope = ((v_theta - (noise - x0)) ** 2).mean(tuple(range(1, x0.ndim)))
        return AffineLoss(base=torch.zeros_like(slope), slope=slope)
