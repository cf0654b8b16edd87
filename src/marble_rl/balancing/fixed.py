"""Constant coefficients on per-reward advantages: A = sum_k alpha_k A_k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from marble_rl.balancing.base import BalanceSettings, Scheduled, check_weights, weight_vector
from marble_rl.errors import InputError
from marble_rl.section import Weights


class FixedSettings(BalanceSettings):
    """Constant coefficients on per-reward advantages."""

    type: Literal["fixed"]
    coefficients: Weights | None = None
    """By reward name, summing to 1; rewards not named get 0. null is 1/K each."""


class Fixed(Scheduled):
    Settings = FixedSettings
    label = "fixed coefficients"
    about = "at once, with fixed coefficients"

    def __init__(self, settings: FixedSettings, rewards: Sequence[str], **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        if settings.coefficients is None:
            self._coefficients = weight_vector(rewards, {}) / len(rewards)
        else:
            self._coefficients = weight_vector(rewards, settings.coefficients, missing=0.0)

    @classmethod
    def check(cls, settings: FixedSettings, rewards: Sequence[str]) -> None:
        if settings.coefficients is None:
            return
        check_weights(settings.coefficients, rewards, "balance.coefficients")
        total = sum(settings.coefficients.values())
        if abs(total - 1.0) > 1e-6:
            raise InputError(
                f"balance.coefficients: they sum to {total:g}, but must sum to 1; divide each by {total:g}"
            )

    def coefficients(self, step: int) -> Tensor:
        return self._coefficients
