"""Loss scaling for float16.

float16 loses precision below 6e-5 (the smallest normal number), where most gradients of a mean over pixels lie. So the
gradient of the prediction is multiplied by a scale, a power of two, before it enters the model's backward pass, and the
parameter gradients are divided by the scale afterwards. If a gradient overflows, the same gradients are computed again
with half the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from marble_rl.gradients.accumulate import RewardGradients
    from marble_rl.training.policy_gradients import PolicyGradients


class LossScale:
    """The factor on gradients in float16; always 1 in other precisions.

    It is halved after an overflow, and doubled after ``GROW_AFTER`` updates without one.
    """

    GROW_AFTER = 200
    FIRST, LARGEST = 2.0**16, 2.0**24

    def __init__(self, dtype: torch.dtype) -> None:
        self._scaled = dtype == torch.float16
        self.value = self.FIRST if self._scaled else 1.0
        self._clean = 0
        """Updates since the last overflow"""
        self._overflows = 0

    def with_retries(self, gradients: Callable[[float], PolicyGradients]) -> PolicyGradients:
        """``gradients(scale)``, with the scale halved until the gradients are finite.

        If a loss is not finite, or a gradient is not finite even with scale 1, the scale is not the cause. Then the
        result is returned as it is, and the scale keeps its old value.
        """
        value, clean = self.value, self._clean
        self._overflows = 0
        while True:
            result = gradients(self.value)
            if result.is_finite:
                return result
            if not result.losses_are_finite or self.value <= 1.0:
                self.value, self._clean = value, clean
                return result
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
        # Older versions saved 1.0 in other precisions, and such a run may be continued in float16.
        if self._scaled and state.get("value", 1.0) > 1.0:
            self.value, self._clean = state["value"], int(state["clean"])


def unscaled(gradients: RewardGradients, scale: float) -> RewardGradients:
    """Divide gradients by the scale that they were computed with. Exact, because it is a power of two."""
    if scale == 1.0:
        return gradients
    square = scale**2
    return replace(
        gradients,
        g=gradients.g.div_(scale),
        shared=gradients.shared.div_(scale),
        norms=gradients.norms / scale,
        **vars(gradients.products.divided_by(square)),
    )
