"""Rules that are tried in the tunnel alone: what the parts of fair balancing contribute, and other solvers on the same
momenta. `type:key=value,...` names any rule with settings, such as `fair:momentum=0.98`."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marble_rl.balancing.averaging import nearest_gram
from marble_rl.balancing.base import Weighing
from marble_rl.balancing.fair import Fair
from marble_rl.balancing.min_norm import as_gram, min_norm
from marble_rl.balancing.proportional import proportional_shares
from marble_rl.errors import InputError
from marble_rl.gradients.accumulate import RewardGradients


class StepsAlongMomenta(Fair):
    """The first moment of AdamW is sum_k w_k m_k, with today's weights: the alternative to feeding AdamW with
    sum_k w_k g_k."""

    _weights: Tensor

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        weighing = super().weigh(step, gradients)
        self._weights = weighing.weights
        return weighing

    def first_moment(self) -> Tensor:
        assert self._momenta is not None
        return self._weights.to(self._momenta) @ self._momenta


class MeanOnMomenta(Fair):
    """Equal shares of the unit momenta: momentum without fairness."""

    def solve(self, unit: Tensor) -> Tensor:
        k = len(unit)
        return torch.ones(k, dtype=torch.float64) * (k / float(unit.sum().clamp_min(1e-9))) ** 0.5


class MinNormOnMomenta(Fair):
    """MARBLE's criterion on the momenta. Scaled to a length of about 1 for each reward, as fair's shares are."""

    def solve(self, unit: Tensor) -> Tensor:
        return len(unit) * min_norm(unit).alpha


class FairOnSignal(Fair):
    """Fairness in what the momenta have in common beyond noise.

    A momentum of pure noise has c = (1 - b) / (1 + b) of the mean squared gradient of a batch, so that
    S = (M - c Q) / (1 - c), Q the running mean of the batches' Gram matrices, estimates the products of the true
    gradients. Its cosines replace those of the noisy momenta.
    """

    _products: Tensor | None = None

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        b = self.settings.momentum
        gram = gradients.gram.cpu()
        old = torch.zeros_like(gram) if self._products is None else self._products
        self._products = b * old + (1 - b) * gram
        return super().weigh(step, gradients)

    def _shares(self, gram: Tensor, norms: Tensor) -> Tensor:
        b = self.settings.momentum
        assert self._products is not None
        signal = gram - (1 - b) / (1 + b) * self._products
        active = norms > 0
        shares = torch.zeros_like(norms)
        n = norms[active]
        # A reward without visible signal keeps a little of its momentum's length.
        own = (signal.diagonal()[active] / n**2).clamp(0.05, 1.0).sqrt()
        cosines = signal[active][:, active] / n[:, None] / n[None, :] / own[:, None] / own[None, :]
        cosines = cosines.clamp(-1, 1)
        cosines.fill_diagonal_(1.0)
        unit = nearest_gram(cosines)
        shares[active] = self.solve(unit / unit.diagonal().sqrt()[:, None] / unit.diagonal().sqrt()[None, :])
        return shares


class FairBySignal(FairOnSignal):
    """As `fair`, with priorities that grow with the signal share of a momentum."""

    def _shares(self, gram: Tensor, norms: Tensor) -> Tensor:
        b = self.settings.momentum
        assert self._products is not None
        active = norms > 0
        shares = torch.zeros_like(norms)
        n = norms[active]
        noise = (1 - b) / (1 + b) * self._products.diagonal()[active] / n**2
        priorities = (1 - noise).clamp_min(0.1)
        unit = gram[active][:, active] / n[:, None] / n[None, :]
        shares[active] = proportional_shares(unit, self.settings.ridge, priorities).shares
        return shares


class UpGradOnMomenta(Fair):
    """UPGrad (Quinton and Rey 2024): the mean of the unit momenta, each projected to where it opposes none."""

    def solve(self, unit: Tensor) -> Tensor:
        from scipy.optimize import nnls

        gram = as_gram(unit)
        factor = np.linalg.cholesky(gram + 1e-6 * np.eye(len(gram))).T
        total = np.zeros(len(gram))
        for k in range(len(gram)):
            total += nnls(factor, -factor[:, k])[0]
            total[k] += 1.0
        return torch.as_tensor(total)


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
    "mean_on_momenta": {"type": "tools.tunnel.rules:MeanOnMomenta"},
    "min_norm_on_momenta": {"type": "tools.tunnel.rules:MinNormOnMomenta"},
    "upgrad_on_momenta": {"type": "tools.tunnel.rules:UpGradOnMomenta"},
}


def section_of(name: str) -> dict[str, Any]:
    """The balance section of a rule's name."""
    head, _, rest = name.partition(":")
    if head not in NAMED:
        raise InputError(f"--rules: unknown rule {head!r}. Valid: {', '.join(NAMED)}, with settings as in `fair:ridge=0.1`")
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
