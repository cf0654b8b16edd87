"""Reward dropout: A = mean of A_k over a random subset of the rewards, drawn anew in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from marble_rl.balancing.base import BalanceSettings, Scheduled
from marble_rl.seeding import generator


class DropoutSettings(BalanceSettings):
    """Reward dropout: each step trains a random subset with equal coefficients."""

    type: Literal["dropout"]
    rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Probability that a reward is left out of a step; at least one stays."""


class Dropout(Scheduled):
    Settings = DropoutSettings
    label = "reward dropout"
    about = "at once, with reward dropout"

    def __init__(self, settings: DropoutSettings, rewards: Sequence[str], *, seed: int, **context: Any) -> None:
        super().__init__(settings, rewards, seed=seed, **context)
        self._seed = seed

    def coefficients(self, step: int) -> Tensor:
        draw = torch.rand(len(self.rewards), generator=generator(self._seed, "dropout", step), dtype=torch.float64)
        kept: Tensor = (draw >= self.settings.rate) | (draw == draw.max())
        return kept.to(torch.float64) / kept.sum()
