"""The usual practice: one scalar reward, then one advantage.

R = sum_k w_k R_k over the rewards that apply to a sample,   A = (R - mean of the group) / std
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from marble_rl.advantages import Scored
from marble_rl.balancing.base import Balancer, BalanceSettings, Combination, check_some_weight, weight_vector
from marble_rl.section import Weights


class WeightedSumSettings(BalanceSettings):
    """The usual practice: one scalar reward sum_k w_k R_k, then one advantage."""

    type: Literal["weighted_sum"]
    weights: Weights = {}
    """w_k by reward name; 1 where not given."""


class WeightedSum(Balancer):
    Settings = WeightedSumSettings
    label = "weighted sum"
    about = "at once, as a weighted sum"

    def __init__(self, settings: WeightedSumSettings, rewards: Sequence[str], **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        self._weights = weight_vector(rewards, settings.weights)

    @classmethod
    def check(cls, settings: WeightedSumSettings, rewards: Sequence[str]) -> None:
        check_some_weight(settings.weights, rewards, "balance.weights")

    @classmethod
    def sum_weights(cls, settings: WeightedSumSettings) -> Weights:
        return settings.weights

    def combine(self, step: int, scored: Scored) -> Combination:
        return Combination(scored.weighted_sum(self._weights))
