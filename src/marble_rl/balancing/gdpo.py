"""GDPO: per-reward advantages, summed, and the sum normalised over the batch.

A = (S - mean S) / (std S + eps),   S = sum_k w_k A_k,   over the samples that some reward applies to
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from marble_rl.advantages import EPSILON, Scored
from marble_rl.balancing.base import Balancer, BalanceSettings, Combination, check_some_weight, weight_vector
from marble_rl.section import Weights


class GdpoSettings(BalanceSettings):
    """GDPO: normalise each reward's advantage in its group, sum, normalise the sum over the batch."""

    type: Literal["gdpo"]
    weights: Weights = {}
    """Weights in the sum by reward name; 1 where not given."""


class Gdpo(Balancer):
    Settings = GdpoSettings
    label = "GDPO"
    about = "at once, balanced by GDPO"

    def __init__(self, settings: GdpoSettings, rewards: Sequence[str], **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        self._weights = weight_vector(rewards, settings.weights)

    @classmethod
    def check(cls, settings: GdpoSettings, rewards: Sequence[str]) -> None:
        check_some_weight(settings.weights, rewards, "balance.weights")

    def combine(self, step: int, scored: Scored) -> Combination:
        total = scored.advantages @ self._weights.to(scored.advantages)
        rated = total[scored.rated]
        normalised = (total - rated.mean()) / (rated.std(unbiased=False) + EPSILON)
        clamped = normalised.clamp(-scored.adv_clip, scored.adv_clip)
        return Combination(torch.where(scored.rated, clamped, 0.0))
