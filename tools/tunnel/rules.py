"""Rules that are tried in the tunnel alone: what the parts of fair balancing contribute, and other ways to weigh the
same momenta. `name:key=value,...` gives a rule settings, such as `fair:momentum=0.98`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from marble_rl.balancing.base import Weighing
from marble_rl.balancing.fair import Fair, FairSettings
from marble_rl.balancing.fair_harmonizer import FairHarmonizer, FairShares
from marble_rl.balancing.min_norm import as_gram, min_norm
from marble_rl.balancing.nearest_gram import nearest_gram
from marble_rl.balancing.proportional import ProportionalShares
from marble_rl.errors import InputError
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.gradients.metric import gram


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
        momenta = torch.stack(list(self.tensors().values()))
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


class _OnSignal(FairHarmonizer):
    """Cosines of the momenta without their noise.

    A momentum of pure noise has c = (1 - b) / (1 + b) of the mean squared gradient of a batch, so that
    S = (M - c Q) / (1 - c), Q the running mean of the batches' Gram matrices, estimates the products of the true
    gradients. Q takes in a batch when it is weighed, not when it is committed: in the tunnel no step fails.
    """

    _batches: Tensor | None = None

    def weigh(self, g: Tensor, off: Sequence[str] = (), rates: Mapping[str, float] | None = None) -> FairShares:
        b, new = self.momentum, gram(g)
        self._batches = (1 - b) * new if self._batches is None else b * self._batches + (1 - b) * new
        return super().weigh(g, off, rates)

    def signal(self, products: Tensor) -> Tensor:
        """[K, K]: S (1 - c)"""
        assert self._batches is not None
        return products - (1 - self.momentum) / (1 + self.momentum) * self._batches

    def shares_for(
        self, products: Tensor, off: Sequence[str] = (), rates: Mapping[str, float] | None = None
    ) -> FairShares:
        squares = products.diagonal()
        if not bool((squares > 0).all()):
            return super().shares_for(products, off, rates)
        signal = self.signal(products)
        own = signal.diagonal().clamp(0.05 * squares, squares).sqrt()
        cosines = (signal / own[:, None] / own[None, :]).clamp(-1, 1).fill_diagonal_(1.0)
        cosines = nearest_gram(cosines)
        unit = cosines / cosines.diagonal().sqrt()[:, None] / cosines.diagonal().sqrt()[None, :]
        return super().shares_for(unit * squares.sqrt()[:, None] * squares.sqrt()[None, :], off, rates)


class FairOnSignal(Variant):
    """`fair` on the cosines of what is not noise."""

    harmonizer_class = _OnSignal


class _BySignal(_OnSignal):
    def shares_for(
        self, products: Tensor, off: Sequence[str] = (), rates: Mapping[str, float] | None = None
    ) -> FairShares:
        share = self.signal(products).diagonal() / products.diagonal().clamp_min(1e-300)
        self._priorities = share.clamp(0.1, 1.0)
        return FairHarmonizer.shares_for(self, products, off, rates)


class FairBySignal(Variant):
    """`fair` with priorities that grow with the share of a momentum that is not noise."""

    harmonizer_class = _BySignal


class _InMetric(FairHarmonizer):
    """Products in AdamW's metric, a^T P^-1 b, P what AdamW divided by in its last step."""

    preconditioner: Callable[[], Tensor | None] = staticmethod(lambda: None)

    def _products_after(self, g: Tensor) -> Tensor:
        return self.momenta.products_after(g, self.preconditioner())


class FairInAdamsMetric(Variant):
    """`fair` in the metric of the optimizer's step."""

    harmonizer_class = _InMetric


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
    "fair_on_signal": {"type": "tools.tunnel.rules:FairOnSignal"},
    "fair_by_signal": {"type": "tools.tunnel.rules:FairBySignal"},
    "fair_in_adams_metric": {"type": "tools.tunnel.rules:FairInAdamsMetric"},
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
