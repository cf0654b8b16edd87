"""One reward alone: A = A_k. A baseline for a run that trains all rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from marble_rl.balancing.base import BalanceSettings, Scheduled, one_hot
from marble_rl.errors import require_name


class SingleSettings(BalanceSettings):
    """Train one reward; the others are scored and logged."""

    type: Literal["single"]
    reward: str
    """Its name."""


class Single(Scheduled):
    Settings = SingleSettings
    label = "one reward"
    about = "of which one is trained"

    @classmethod
    def check(cls, settings: SingleSettings, rewards: Sequence[str]) -> None:
        require_name(settings.reward, rewards, "balance.reward")

    def coefficients(self, step: int) -> Tensor:
        return one_hot(self.rewards, self.settings.reward)
