"""Which numbers a run computes with, and what happens to gradients that half precision cannot hold.

The frozen base is held, and passes through it computed, in ``model.dtype``. Float32 whatever it is: the adapters, their
optimizer, latents and the solver's arithmetic, losses and everything after them.

float16 has no exponents below 6e-5, where most gradients of a mean over pixels lie. So what enters the backward pass is
multiplied by a scale, a power of two, and the gradients divided by it. Where the scale was too much (a gradient
overflows) the same gradients are computed again with half of it: nothing was changed by the first attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from marble_rl.errors import NonFiniteGradient

if TYPE_CHECKING:
    from marble_rl.gradients.accumulate import RewardGradients
    from marble_rl.training.policy_gradients import PolicyGradients


class LossScale:
    """The factor on gradients in float16; 1 for other numbers, which need none.

    Halved by an overflow, doubled after ``GROW_AFTER`` updates without one.
    """

    GROW_AFTER = 200
    FIRST, LARGEST = 2.0**16, 2.0**24

    def __init__(self, dtype: torch.dtype) -> None:
        self._scaled = dtype == torch.float16
        self.value = self.FIRST if self._scaled else 1.0
        self._clean = 0
        self._overflows = 0

    def applied(self, gradients: Callable[..., PolicyGradients]) -> PolicyGradients:
        """``gradients(scale=...)``, on smaller and smaller scales until they are finite.

        Where the losses are not finite, or the gradients not even on scale 1, it is no overflow: the caller's affair,
        and the scale stays what it was.
        """
        value, clean = self.value, self._clean
        self._overflows = 0
        while True:
            found = gradients(scale=self.value)
            if found.is_finite:
                return found
            if not found.losses_are_finite or self.value <= 1.0:
                self.value, self._clean = value, clean
                return found
            self.value /= 2
            self._clean = 0
            self._overflows += 1

    def update_done(self) -> None:
        self._clean += 1
        if self._scaled and self._clean >= self.GROW_AFTER:
            self.value = min(2 * self.value, self.LARGEST)
            self._clean = 0

    @property
    def figures(self) -> dict[str, float]:
        """For the log, in float16 only."""
        return {"guard/overflows": float(self._overflows), "guard/loss_scale": self.value} if self._scaled else {}

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "clean": self._clean} if self._scaled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        # 1.0 is what older versions saved for other numbers, from which a run may be continued in float16.
        if self._scaled and state.get("value", 1.0) > 1.0:
            self.value, self._clean = state["value"], int(state["clean"])


class Skips:
    """Updates that were left out because a loss or gradient was not finite. They changed nothing and count as none.

    The rollout of such an update is dropped with it. ``total`` belongs to the number of a rollout, so that the next
    attempt draws other prompts and noise; it is saved, so that a resumed run draws the same ones.
    """

    MOST = 10
    """In a row; more of them are no accident."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.total = 0
        self._in_a_row = 0

    def skip(self, bad: NonFiniteGradient) -> None:
        """Count one, or raise it."""
        if not self.allowed:
            raise bad
        if self._in_a_row == self.MOST:
            raise NonFiniteGradient(f"{self.MOST} updates in a row were skipped, and now {bad}") from bad
        self._in_a_row += 1
        self.total += 1

    def update_done(self) -> None:
        self._in_a_row = 0

    @property
    def figures(self) -> dict[str, float]:
        """For the log: how many were left out before this update."""
        return {"guard/skipped": float(self._in_a_row)} if self.allowed else {}


def unscaled(found: RewardGradients, scale: float) -> RewardGradients:
    """Gradients that were computed with a factor, without it. Exact: the factor is a power of two."""
    if scale == 1.0:
        return found
    square = scale**2
    return replace(
        found,
        g=found.g.div_(scale),
        shared=found.shared.div_(scale),
        norms=found.norms / scale,
        **vars(found.products.divided_by(square)),
        in_metric=None if found.in_metric is None else found.in_metric.divided_by(square),
    )
