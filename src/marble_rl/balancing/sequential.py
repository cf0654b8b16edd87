"""A hand-made schedule: A = A_k(step), one reward after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from marble_rl.balancing.base import BalanceSettings, Scheduled, one_hot
from marble_rl.errors import require_name
from marble_rl.section import Section


class Stage(Section):
    """One stage of a sequential schedule."""

    reward: str
    """The reward trained."""
    steps: PositiveInt
    """For how many optimizer steps."""


class SequentialSettings(BalanceSettings):
    """A hand-made schedule: one reward after the other. The last stage lasts to the end."""

    type: Literal["sequential"]
    stages: Annotated[list[Stage], Field(min_length=1)]
    """The stages in their order."""


class Sequential(Scheduled):
    Settings = SequentialSettings
    label = "stages"
    about = "one after the other"

    @classmethod
    def check(cls, settings: SequentialSettings, rewards: Sequence[str]) -> None:
        for i, stage in enumerate(settings.stages):
            require_name(stage.reward, rewards, f"balance.stages.{i}.reward")

    def coefficients(self, step: int) -> Tensor:
        stages = self.settings.stages
        for stage in stages[:-1]:
            if step < stage.steps:
                return one_hot(self.rewards, stage.reward)
            step -= stage.steps
        return one_hot(self.rewards, stages[-1].reward)
