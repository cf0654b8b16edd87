"""MARBLE's quadratic program on the advantages in place of the gradients.

    alpha* = argmin_{simplex} alpha^T C alpha,   C_kl = <A_k A_l> / (|A_k| |A_l|)

Where gradients are mostly noise, their cosines are close to the correlations of the advantages, so MARBLE solves nearly
this problem (docs/diagnose.md). This rule needs no gradient per reward. Compared with MARBLE it shows what the
gradients add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from marble_rl.advantages import Scored, second_moments
from marble_rl.balancing.base import Balancer, BalanceSettings, Combination
from marble_rl.balancing.harmonizer import Coefficients, Harmonizer


class MinVarianceSettings(BalanceSettings):
    """MARBLE's quadratic program on the advantages in place of the gradients: the mix of the rewards with the smallest
    variance. It needs no gradient per reward. Compared with MARBLE it shows what the gradients add
    (docs/results.md)."""

    type: Literal["min_variance"]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.965
    """Smoothing of the coefficients over steps. 0.965 per step is the paper's 0.7 per 10 steps."""


class MinVariance(Balancer):
    Settings = MinVarianceSettings
    label = "smallest variance"
    about = "at once, by the mix with the smallest variance"

    def __init__(
        self, settings: MinVarianceSettings, rewards: Sequence[str], *, adv_clip: float, **context: Any
    ) -> None:
        super().__init__(settings, rewards, adv_clip=adv_clip, **context)
        self._harmonizer = Harmonizer(rewards, refresh_every=1, ema_decay=settings.ema_decay, adv_clip=adv_clip)

    def combine(self, step: int, scored: Scored) -> Combination:
        solution = self._harmonizer.solve(second_moments(scored.advantages))
        advantage = scored.advantages @ solution.alpha_bar.to(scored.advantages)
        return Combination(advantage, solution.alpha_bar, state=solution)

    def coefficients(self, step: int) -> Tensor:
        return self._harmonizer.alpha_bar

    def commit(self, state: Coefficients) -> None:
        self._harmonizer.commit(state)

    def state_dict(self) -> dict[str, Any]:
        return self._harmonizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._harmonizer.load_state_dict(state)
