"""Cosines of one direction with every reward's gradient, in-batch and on the other half, and each reward's signal.

In-batch cosines measure a direction against the gradients that it was computed from, so a reward's noise counts as
agreement with itself. The other-half figures (`heldout/...` in the log) make the direction from one half of the prompt
groups and measure it against the gradients of the other half (docs/method.md, section 6).

Everything comes from products of gradients; no parameter is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIGNAL_DECAY = 0.9
"""Smoothing of the signal over refreshes"""


@dataclass(frozen=True)
class Harmony:
    """Cosines of one direction with the gradients of the rewards that have one. Other-half figures are averaged over
    both choices of half."""

    min_cos: float
    mean_cos: float
    var_cos: float
    conflict: float
    """1 if the direction points against at least one reward, else 0; averaged for the other-half figures. Their mean
    over steps is the conflict rate."""


def harmony(products: Tensor, squared_norms: Tensor, direction_squared_norm: Tensor) -> Harmony | None:
    """Harmony of a direction d, from d.g_k [K], ||g_k||^2 [K] and ||d||^2; None where no cosine is defined."""
    defined = squared_norms > 0
    if not defined.any() or direction_squared_norm <= 0:
        return None
    cosines = products[defined] / (squared_norms[defined] * direction_squared_norm).sqrt()
    return Harmony(
        min_cos=float(cosines.min()),
        mean_cos=float(cosines.mean()),
        var_cos=float(cosines.var(unbiased=False)),
        conflict=float(cosines.min() < 0),
    )


def in_batch_harmony(gram: Tensor, weights: Tensor, rewards: int) -> Harmony | None:
    """Of d = sum_j weights_j g_j with the first ``rewards`` gradients behind ``gram`` [J, J]."""
    products = gram @ weights
    return harmony(products[:rewards], gram.diagonal()[:rewards], weights @ products)


def other_half_harmony(
    half_gram: Tensor, rule: Callable[[Tensor], Tensor], rewards: int, made_from: Tensor | None = None
) -> Harmony | None:
    """Of the direction that ``rule`` (Gram [J, J] -> weights [J]) makes from one half, with the other half's
    gradients; averaged over both choices of half.

    ``made_from`` [2, 2, J, J]: the products that the rule sees, where cosines are measured in others (a metric)."""
    seen = half_gram if made_from is None else made_from
    ways = []
    for made, measured in ((0, 1), (1, 0)):
        weights = rule(seen[made, made])
        ways.append(
            harmony(
                (half_gram[measured, made] @ weights)[:rewards],
                half_gram[measured, measured].diagonal()[:rewards],
                weights @ half_gram[made, made] @ weights,
            )
        )
    both = [way for way in ways if way is not None]
    if not both:
        return None
    return Harmony(*(sum(getattr(way, name) for way in both) / len(both) for name in Harmony.__annotations__))


@dataclass(frozen=True)
class Signal:
    """signal_k = M_kk / G_kk, each smoothed over refreshes: the share of a reward's squared gradient that is not noise.

    Near 1: the reward can be learnt at this batch size. Near 0: its gradient is noise.
    """

    unbiased: Tensor
    """[K] float64: running mean of M_kk"""
    raw: Tensor
    """[K] float64: running mean of G_kk"""

    @classmethod
    def unknown(cls, rewards: int) -> Signal:
        """Before the first refresh."""
        return cls(torch.zeros(rewards, dtype=torch.float64), torch.zeros(rewards, dtype=torch.float64))

    @property
    def share(self) -> Tensor:
        """[K]; NaN for rewards that no refresh has measured."""
        return self.unbiased / self.raw

    def after(self, gram: Tensor, half_gram: Tensor, decay: float = SIGNAL_DECAY) -> Signal:
        """Updated by a batch's products [K, K] and [2, 2, K, K]. Rewards without a gradient in
        both halves keep their value."""
        raw = gram.diagonal().to(self.raw)
        unbiased = half_gram[0, 1].diagonal().to(self.unbiased)
        seen = (half_gram[0, 0].diagonal() > 0) & (half_gram[1, 1].diagonal() > 0) & (raw > 0)
        return Signal(
            torch.where(seen, decay * self.unbiased + (1 - decay) * unbiased, self.unbiased),
            torch.where(seen, decay * self.raw + (1 - decay) * raw, self.raw),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"unbiased": self.unbiased.tolist(), "raw": self.raw.tolist()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Signal:
        return cls(*(torch.tensor(state[key], dtype=torch.float64) for key in ("unbiased", "raw")))
