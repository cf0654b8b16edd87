"""Fair balancing as a rule of the trainer: the equations are in fair_harmonizer.py.

It needs one gradient per reward in every step. They come from one backward pass, so a step costs little more than one
with a weighted sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.balancing.base import Combination, GradientSettings, Guarding, Weighing, check_weights
from marble_rl.balancing.direction import STATIONARY_NORM
from marble_rl.balancing.earlier import EarlierBatches
from marble_rl.balancing.fair_harmonizer import FairHarmonizer, FairShares
from marble_rl.balancing.momenta import STORED_AS
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.types import Metrics


class FairSettings(GradientSettings):
    """Proportional fairness between one momentum per reward, in every step."""

    type: Literal["fair"]
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the momenta. The rule sees an average over about (1 + momentum) / (1 - momentum) batches."""
    ridge: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    """Weight of the identity in the Gram matrix of the unit momenta: it bounds the shares where rewards oppose each
    other."""


@dataclass(frozen=True)
class _Batch:
    """What `commit` adds to the momenta."""

    gradients: RewardGradients
    off: Sequence[str]


class Fair(Guarding):
    Settings = FairSettings
    label = "fair"
    about = "at once, each with its fair share of every step"
    keeps_halves = False
    uses_priorities = True

    def __init__(self, settings: Any, rewards: Sequence[str], **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        self.harmonizer = FairHarmonizer(rewards, settings.momentum, settings.ridge, self.priorities, self.guards)
        self._earlier = EarlierBatches(rewards, settings.momentum)

    @classmethod
    def check(cls, settings: Any, rewards: Sequence[str]) -> None:
        check_weights(settings.probe_weights, rewards, "balance.probe_weights")

    @classmethod
    def bytes_per_parameter(cls, rewards: Sequence[str], guards: Sequence[str]) -> int:
        return (len(rewards) + 1) * STORED_AS.itemsize  # one momentum more, of the weighted sum

    def needs_gradients(self, step: int) -> bool:
        return True

    def combine(self, step: int, scored: Scored) -> Combination:
        """With the weights that the momenta give so far. The trainer does not call it: every step has gradients."""
        return Combination(scored.advantages @ self.harmonizer.current().to(scored.advantages))

    def weigh(self, step: int, gradients: RewardGradients, rates: Mapping[str, float] | None = None) -> Weighing:
        off = self.rewards_off(step)
        products = self.harmonizer.momenta.products_with(gradients.g, gradients.gram)
        fair = self.harmonizer.shares_for(products.after, off, rates)
        before = self.harmonizer.shares_for(products.momenta, off, rates)
        return Weighing(
            fair.weights,
            fair.shares / fair.shares.sum().clamp_min(1e-30),
            share_figures(self.rewards, fair, self.guards),
            _Batch(gradients, off),
            for_half=lambda gram: fair.weights,
            elsewhere=self._earlier.measured_on(gradients, products, before.weights),
        )

    def weights_for(self, gram: Tensor) -> Tensor:
        return self.harmonizer.shares_for(gram).weights

    def commit(self, state: _Batch) -> None:
        gradients = state.gradients
        self.harmonizer.commit(gradients.g, state.off)
        self._earlier.commit(gradients.norms.cpu() > 0, gradients.rest, state.off)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.harmonizer.state_dict(), **self._earlier.tensors()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.harmonizer.load_state_dict({name: t for name, t in tensors.items() if name in self.rewards})
        self._earlier.load_tensors(tensors)

    def state_dict(self) -> dict[str, Any]:
        return self._earlier.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._earlier.load_state_dict(state)


def share_figures(rewards: Sequence[str], fair: FairShares, guards: Sequence[str] = ()) -> Metrics:
    """Shares, momenta and progress by reward, the quality of the solution, and what the guards add."""
    columns = {"share": fair.shares, "momentum_norm": fair.momentum_norms, "progress": fair.progress}
    places = {k: name for k, name in enumerate(rewards) if name in guards}
    opposed = [x < 0 for k, x in enumerate(fair.progress.tolist()) if k not in places]
    return {
        **({} if fair.pull is None else fair.pull.figures(places)),
        **{
            f"{key}/{name}": x
            for key, values in columns.items()
            for name, x in zip(rewards, values.tolist(), strict=True)
        },
        "fair/opposed": float(sum(opposed)),
        "fair/residual": fair.residual,
        "fair/common": fair.common,
        "fair/stationary": float(fair.common < STATIONARY_NORM),
    }
