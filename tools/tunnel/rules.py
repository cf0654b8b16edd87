"""Rules that are tried in the tunnel alone: what the parts of fair balancing contribute, and other ways to weigh the
same momenta. `name:key=value,...` gives a rule settings, such as `fair:momentum=0.98`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from marble_rl.balancing.base import Weighing
from marble_rl.balancing.fair import Fair, FairSettings
from marble_rl.balancing.fair_harmonizer import FairHarmonizer
from marble_rl.balancing.min_norm import as_gram, min_norm
from marble_rl.balancing.proportional import ProportionalShares
from marble_rl.errors import InputError
from marble_rl.gradients.accumulate import RewardGradients


class VariantSettings(FairSettings):
    """Those of `fair`."""

    type: str  # type: ignore[assignment]


class StepsAlongMomenta(Fair):
    """The first moment of AdamW is sum_k w_k m_k with today's weights: the alternative to feeding it sum_k w_k g_k."""

    Settings = VariantSettings
    _weights: Tensor

    def weigh(self, step: int, gradients: RewardGradients, rates: Mapping[str, float] | None = None) -> Weighing:
        weighing = super().weigh(step, gradients, rates)
        self._weights = weighing.weights
        return weighing

    def first_moment(self) -> Tensor:
        momenta = self.harmonizer.momenta.values
        assert momenta is not None, "asked after commit"
        return self._weights.to(momenta) @ momenta


class Variant(Fair):
    """`fair` with another harmonizer."""

    Settings = VariantSettings
    harmonizer_class: ClassVar[type[FairHarmonizer]]

    def __init__(self, settings: Any, rewards: Sequence[str], **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        self.harmonizer = self.harmonizer_class(
            rewards, settings.momentum, settings.ridge, self.priorities, self.guards
        )


class _Equal(FairHarmonizer):
    def solve(self, unit: Tensor, priorities: Tensor) -> ProportionalShares:
        k = len(unit)
        return ProportionalShares(torch.full((k,), (k / float(unit.sum().clamp_min(1e-9))) ** 0.5).double(), 0.0)


class MeanOnMomenta(Variant):
    """Equal shares of the unit momenta: momentum without fairness."""

    harmonizer_class = _Equal


class _MinNorm(FairHarmonizer):
    def solve(self, unit: Tensor, priorities: Tensor) -> ProportionalShares:
        return ProportionalShares(len(unit) * min_norm(unit).alpha, 0.0)


class MinNormOnMomenta(Variant):
    """MARBLE's criterion on the momenta, with shares that sum to K."""

    harmonizer_class = _MinNorm


class _UpGrad(FairHarmonizer):
    def solve(self, unit: Tensor, priorities: Tensor) -> ProportionalShares:
        from scipy.optimize import nnls

        matrix = as_gram(unit)
        factor = np.linalg.cholesky(matrix + 1e-6 * np.eye(len(matrix))).T
        total = np.ones(len(matrix))
        for k in range(len(matrix)):
            total += nnls(factor, -factor[:, k])[0]
        return ProportionalShares(torch.as_tensor(total), 0.0)


class UpGradOnMomenta(Variant):
    """UPGrad (Quinton and Rey 2024): the sum of the unit momenta, each projected to where it opposes none."""

    harmonizer_class = _UpGrad


NAMED: dict[str, dict[str, Any]] = {
    "weighted_sum": {"type": "weighted_sum"},
    "gdpo": {"type": "gdpo"},
    "uniform": {"type": "fixed"},
    "unit_mean": {"type": "unit_mean", "refresh_every": 1},
    "marble": {"type": "marble"},
    "marble_alpha_over_norm": {"type": "marble", "apply": "alpha_over_norm"},
    "fair": {"type": "fair"},
    "fair_without_momentum": {"type": "fair", "momentum": 0.0},
    "fair_own_moment": {"type": "tools.tunnel.rules:StepsAlongMomenta"},
    "mean_on_momenta": {"type": "tools.tunnel.rules:MeanOnMomenta"},
    "min_norm_on_momenta": {"type": "tools.tunnel.rules:MinNormOnMomenta"},
    "upgrad_on_momenta": {"type": "tools.tunnel.rules:UpGradOnMomenta"},
}


def section_of(name: str) -> dict[str, Any]:
    """The balance section of a rule's name."""
    head, _, rest = name.partition(":")
    if head not in NAMED:
        raise InputError(
            f"--rules: unknown rule {head!r}. Valid: {', '.join(NAMED)}, with settings as in `fair:ridge=0.1`"
        )
    section = dict(NAMED[head])
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"--rules: {name!r}: expected key=value after the colon, got {part!r}")
        try:
            section[key] = json.loads(value)
        except json.JSONDecodeError:
            section[key] = value
    return section
