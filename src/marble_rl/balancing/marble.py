"""MARBLE as in the paper: the min-norm point of the unit gradients every N steps, its smoothed coefficients in between.

The equations, and our decisions where the paper leaves them open, are in direction.py (steps 3 to 5) and
harmonizer.py (7 and 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.balancing.base import Balancer, Combination, GradientSettings, Weighing, check_weights
from marble_rl.balancing.direction import Direction
from marble_rl.balancing.harmonizer import Coefficients, Harmonizer
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.types import Metrics


class RefreshSettings(GradientSettings):
    """Settings of rules that refresh their coefficients every N steps."""

    refresh_every: PositiveInt = 10
    """Optimizer steps between two solutions of the quadratic program; 1 solves it in every step."""
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.7
    """rho: decay of the running mean of the coefficients, per refresh."""
    uniform_after: Annotated[int, Field(ge=0)] | None = None
    """From this step on use equal coefficients (the paper's late uniform stage); null never does."""


class MarbleSettings(RefreshSettings):
    """MARBLE: one direction that opposes no reward's gradient in the batch, found by a quadratic program."""

    type: Literal["marble"] = "marble"
    apply: Literal["alpha", "alpha_over_norm"] = "alpha"
    """What multiplies the advantages between refreshes. `alpha`: the smoothed coefficients (the paper); a reward with a
    larger gradient then counts for more. `alpha_over_norm`: the smoothed coefficients over smoothed gradient norms."""


class Marble(Balancer):
    Settings: ClassVar[type[GradientSettings]] = MarbleSettings
    label = "MARBLE"
    about = "at once, balanced by MARBLE"
    solves = True
    harmonizer_class: ClassVar[type[Harmonizer]] = Harmonizer

    def __init__(self, settings: Any, rewards: Sequence[str], *, adv_clip: float, **context: Any) -> None:
        super().__init__(settings, rewards, adv_clip=adv_clip, **context)
        self.harmonizer = self.harmonizer_class(
            rewards,
            refresh_every=settings.refresh_every,
            ema_decay=settings.ema_decay,
            apply=settings.apply,
            uniform_after=settings.uniform_after,
            adv_clip=adv_clip,
        )

    @classmethod
    def check(cls, settings: Any, rewards: Sequence[str]) -> None:
        check_weights(settings.probe_weights, rewards, "balance.probe_weights")

    @classmethod
    def never_opposes(cls, settings: Any) -> bool:
        return True

    def needs_gradients(self, step: int) -> bool:
        return self.harmonizer.should_refresh(step)

    def combine(self, step: int, scored: Scored) -> Combination:
        return Combination(self.harmonizer.combine(scored.advantages, step), self.coefficients(step))

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        solution = self.harmonizer.solve(gradients.gram)
        return Weighing(solution.weights, solution.alpha_bar, solution_figures(self.rewards, solution), solution)

    def weights_for(self, gram: Tensor) -> Tensor:
        return self.harmonizer.direction(gram).weights

    def coefficients(self, step: int) -> Tensor:
        return self.harmonizer.smoothed(step)

    def commit(self, state: Coefficients | None) -> None:
        if state is not None:
            self.harmonizer.commit(state)

    def state_dict(self) -> dict[str, Any]:
        return self.harmonizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.harmonizer.load_state_dict(state)


def solution_figures(rewards: Sequence[str], solution: Direction) -> Metrics:
    """Metrics of a refresh: alpha, norm and KKT residual of the solution, and which rewards had no gradient."""
    return {
        **{f"alpha/{name}": a for name, a in zip(rewards, solution.alpha.tolist(), strict=True)},
        **{f"guard/no_signal/{n}": float(not on) for n, on in zip(rewards, solution.active.tolist(), strict=True)},
        "qp/norm": solution.norm,
        "qp/kkt_residual": solution.kkt_residual,
        "qp/stationary": float(solution.stationary),
    }
