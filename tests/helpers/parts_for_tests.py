"""A balancing rule and a loss as a user would write them, named in configs by import path."""

from __future__ import annotations

import sys
from typing import Any

import torch
from pydantic import PositiveFloat
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.balancing.base import Balancer, Combination, GradientSettings, Weighing
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.losses.base import AffineLoss, Loss, LossSettings, Noised


class LoudestSettings(GradientSettings):
    """Follow the reward whose gradient is longest, in every second step."""

    boost: PositiveFloat = 1.0
    """Factor on its gradient."""


class Loudest(Balancer):
    Settings = LoudestSettings
    label = "loudest"
    about = "at once, by the one with the longest gradient"

    def __init__(self, settings: LoudestSettings, rewards: Any, **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        self.chosen = 0

    def needs_gradients(self, step: int) -> bool:
        return step % 2 == 0

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        weights = self.weights_for(gradients.gram)
        chosen = int(weights.argmax())
        return Weighing(weights, figures={"loudest/chosen": float(chosen)}, state=chosen)

    def weights_for(self, gram: Tensor) -> Tensor:
        weights = torch.zeros(len(gram), dtype=torch.float64)
        weights[int(gram.diagonal().argmax())] = self.settings.boost
        return weights

    def combine(self, step: int, scored: Scored) -> Combination:
        return Combination(scored.advantages[:, self.chosen], state=self.chosen)

    def commit(self, state: int) -> None:
        self.chosen = state

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chosen = state["chosen"]


class PullSettings(LossSettings):
    """Squared distance of the implied clean latent, without adaptive weighting."""

    power: PositiveFloat = 2.0
    """Of the error."""


class Pull(Loss):
    Settings = PullSettings

    def base_has_gradient(self, on_policy: bool) -> bool:
        return False

    def terms(self, v_theta: Tensor, v_old: Tensor | None, sample: Noised) -> AffineLoss:
        assert v_old is None
        t = sample.t.reshape(-1, *[1] * (sample.x0.ndim - 1))
        error = (sample.x_t - t * v_theta - sample.x0).abs() ** self.settings.power
        slope = error.flatten(1).mean(1)
        return AffineLoss(torch.zeros_like(slope), slope)


class NotARule:
    """Derived from nothing."""


class Speechless(Balancer):
    """Asks for gradients and does not say what it makes of them."""

    Settings = GradientSettings
    label = "speechless"
    about = "at once"

    def combine(self, step: int, scored: Scored) -> Combination:
        return Combination(scored.advantages.mean(1))


class Quits(Loudest):
    """Ends the program without an error, in the method of that name."""

    class Settings(LoudestSettings):  # type: ignore[misc]
        where: str = ""

    def __init__(self, settings: Any, rewards: Any, **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        self.quit_in("__init__")

    def quit_in(self, method: str) -> None:
        if self.settings.where == method:
            sys.exit(0)

    @classmethod
    def check(cls, settings: Any, rewards: Any) -> None:
        if settings.where == "check":
            sys.exit(0)

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        if step == 2:
            self.quit_in("weigh")
        return super().weigh(step, gradients)

    def commit(self, state: int) -> None:
        self.quit_in("commit")
        super().commit(state)

    def state_dict(self) -> dict[str, Any]:
        self.quit_in("state_dict")
        return super().state_dict()


class Broken(Pull):
    def terms(self, v_theta: Tensor, v_old: Tensor | None, sample: Noised) -> AffineLoss:
        raise KeyError("nothing here")
