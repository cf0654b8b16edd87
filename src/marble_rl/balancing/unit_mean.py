"""Equal coefficients on unit gradients, without a QP. Shows what normalisation alone achieves.

refresh      d = (mean_k ghat_k) * mean_k ||g_k||      over the rewards with a gradient in this batch
in between   A = sum_k w_k A_k,   w_k = (1/K) mean(n) / n_k,   n_k smoothed norms of the gradients
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.balancing.base import Balancer, Combination, GradientSettings, Weighing, check_weights
from marble_rl.balancing.direction import common_direction
from marble_rl.balancing.harmonizer import norm_boost, norms_from, norms_state, smoothed_norms
from marble_rl.balancing.marble import solution_figures
from marble_rl.balancing.min_norm import equal_shares
from marble_rl.gradients.accumulate import RewardGradients


class UnitMeanSettings(GradientSettings):
    """The mean of the unit gradients: equal coefficients over gradient norms, no quadratic program."""

    type: Literal["unit_mean"]
    refresh_every: PositiveInt = 10
    """Optimizer steps between two measurements of the gradients' norms; 1 takes the mean of the unit gradients in every
    step."""
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.7
    """Smoothing of the norms over refreshes."""


class UnitMean(Balancer):
    Settings = UnitMeanSettings
    label = "mean of unit gradients"
    about = "at once, by the mean of their unit gradients"

    def __init__(self, settings: UnitMeanSettings, rewards: Sequence[str], *, adv_clip: float, **context: Any) -> None:
        super().__init__(settings, rewards, adv_clip=adv_clip, **context)
        self._norms = torch.full((len(self.rewards),), float("nan"), dtype=torch.float64)

    @classmethod
    def check(cls, settings: UnitMeanSettings, rewards: Sequence[str]) -> None:
        check_weights(settings.probe_weights, rewards, "balance.probe_weights")

    def needs_gradients(self, step: int) -> bool:
        return bool(step % self.settings.refresh_every == 0)

    def combine(self, step: int, scored: Scored) -> Combination:
        weights = self.coefficients(step) * norm_boost(self._norms)
        return Combination(scored.advantages @ weights.to(scored.advantages), self.coefficients(step), self._norms)

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        direction = common_direction(gradients.gram, equal_shares)
        norms = smoothed_norms(self._norms, gradients.gram, direction.active, self.settings.ema_decay)
        figures = solution_figures(self.rewards, direction)
        return Weighing(direction.weights, self.coefficients(step), figures, norms)

    def weights_for(self, gram: Tensor) -> Tensor:
        return common_direction(gram, equal_shares).weights

    def coefficients(self, step: int) -> Tensor:
        return torch.full((len(self.rewards),), 1 / len(self.rewards), dtype=torch.float64)

    def commit(self, state: Tensor) -> None:
        self._norms = state

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards), "norms": norms_state(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = norms_from(state["norms"])
