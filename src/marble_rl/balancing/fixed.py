"""Constant coefficients on per-reward advantages: A = sum_k alpha_k A_k.

With guards every step has one gradient per reward (guards.py; m_k: momenta, as in fair_harmonizer.py):

    update = sum_k alpha_k g_k + sum_g w_g g_g ,    w_g = lambda_g L / ||m_g|| ,    L / ||m_g|| <= 10
    d0 = sum_k alpha_k m_k ,    L = max(||d0||, sqrt(sum_k (alpha_k ||m_k||)^2))

The second length is that of d0 if the objectives had nothing in common: it stays where they cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from marble_rl.balancing.base import (
    BalanceSettings,
    Guarding,
    Scheduled,
    Weighing,
    check_weights,
    weight_vector,
)
from marble_rl.balancing.guards import pull_of_guards
from marble_rl.balancing.harmonizer import MAX_BOOST
from marble_rl.balancing.momenta import STORED_AS, Momenta
from marble_rl.errors import InputError
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.section import Weights


class FixedSettings(BalanceSettings):
    """Constant coefficients on per-reward advantages."""

    type: Literal["fixed"]
    coefficients: Weights | None = None
    """By reward name, summing to 1; rewards not named get 0. null is 1/K each. Guards have none."""
    gradients: Literal["fused", "passes"] = "fused"
    """Only used with guards. `fused`: the gradients of all rewards from one backward pass. `passes`: one backward pass
    per reward, slower, for layers that fused gradients do not support."""


class Fixed(Scheduled, Guarding):
    Settings = FixedSettings
    label = "fixed coefficients"
    about = "at once, with fixed coefficients"

    def __init__(self, settings: FixedSettings, rewards: Sequence[str], **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        if settings.coefficients is None:
            objectives = weight_vector(rewards, dict.fromkeys(self.guards, 0.0))
            self._coefficients = objectives / objectives.sum()
        else:
            self._coefficients = weight_vector(rewards, settings.coefficients, missing=0.0)
        self._momenta = Momenta(rewards)
        """Stay empty without guards"""

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

    @classmethod
    def check_guards(cls, settings: FixedSettings, guards: Sequence[str]) -> None:
        for name in guards:
            if name in (settings.coefficients or {}):
                raise InputError(
                    f"balance.coefficients: {name!r} is a guard, which has no coefficient; remove it there, or remove "
                    "its `guard`"
                )

    def coefficients(self, step: int) -> Tensor:
        return self._coefficients

    @classmethod
    def bytes_per_parameter(cls, rewards: Sequence[str], guards: Sequence[str]) -> int:
        return len(rewards) * STORED_AS.itemsize if guards else 0

    def needs_gradients(self, step: int) -> bool:
        return bool(self.guards)

    def weigh(self, step: int, gradients: RewardGradients, rates: Mapping[str, float] | None = None) -> Weighing:
        off, rates = self.rewards_off(step), rates or {}
        alpha = self._coefficients * weight_vector(self.rewards, dict.fromkeys(off, 0.0))
        places = {k: name for k, name in enumerate(self.rewards) if name in self.guards}
        products = self._momenta.products_with(gradients.g, gradients.gram).after
        norms = products.diagonal().clamp_min(0.0).sqrt()
        unrelated, whole = (alpha * norms).square().sum(), alpha @ products @ alpha
        length = math.sqrt(max(float(unrelated), float(whole)))
        known = {k: rates[name] for k, name in places.items() if name in rates and length > 0}
        pull = pull_of_guards(products, alpha, length, known)
        boost = torch.where(norms > 0, length / norms, 0.0).clamp_max(MAX_BOOST)
        weights = self._coefficients + pull.multipliers * boost
        figures = pull.figures(places)
        return Weighing(weights, self._coefficients, figures, (gradients.g, off), for_half=lambda gram: weights)

    def weights_for(self, gram: Tensor) -> Tensor:
        return self._coefficients

    def commit(self, state: tuple[Tensor, Sequence[str]] | None) -> None:
        if state is not None:
            self._momenta.commit(*state)

    def tensors(self) -> dict[str, Tensor]:
        return self._momenta.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._momenta.load_state_dict(tensors)
