"""Cosines of one direction with every reward's gradient, in-batch and on unseen samples, and each reward's signal.

In-batch cosines measure a direction against the gradients that it was computed from, so a reward's noise counts as
agreement with itself. `heldout/...` in the log measures a direction against gradients of samples that it was not made
from: one half of the prompt groups against the other (docs/method.md, section 6), or earlier batches against the next
(section 7).

Everything is computed from inner products of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIGNAL_DECAY = 0.9
"""Decay of the running means behind the signal, per refresh"""


@dataclass(frozen=True)
class Harmony:
    """Cosines of one direction with the gradients of all rewards that have a gradient. Other-half cosines are averaged
    over both choices of half."""

    min_cos: float
    mean_cos: float
    var_cos: float
    conflict: float
    """1 if the cosine with at least one reward is negative, else 0. On the other half: the mean over both choices, so
    it can be 0.5. The mean over steps is the conflict rate."""


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
    """Harmony of d = sum_j weights_j g_j with the first ``rewards`` of the J gradients. ``gram`` [J, J]: their Gram
    matrix."""
    products = gram @ weights
    return harmony(products[:rewards], gram.diagonal()[:rewards], weights @ products)


def other_half_harmony(half_gram: Tensor, rule: Callable[[Tensor], Tensor], rewards: int) -> Harmony | None:
    """Harmony of a direction made from one half with the other half's gradients, averaged over both choices of half.

    ``half_gram`` [2, 2, J, J]. ``rule`` computes the direction's weights [J] from one half's Gram matrix [J, J]."""
    ways = []
    for made, measured in ((0, 1), (1, 0)):
        weights = rule(half_gram[made, made])
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


def agreement_of_halves(half_gram: Tensor) -> Tensor:
    """[K]: M_kk from the products [2, 2, K, K] of the two halves' gradients; NaN where a half has no gradient."""
    there = (half_gram[0, 0].diagonal() > 0) & (half_gram[1, 1].diagonal() > 0)
    return torch.where(there, half_gram[0, 1].diagonal(), torch.nan)


@dataclass(frozen=True)
class Signal:
    """signal_k = M_kk / G_kk: the share of a reward's squared gradient norm that is not noise.

    G is the Gram matrix of the batch. M_kk is the product of the gradients of two halves, or of a batch and what a rule
    remembers of earlier ones: it estimates the squared norm of the expected gradient without bias. Numerator and
    denominator are running means over refreshes. Near 1: the reward can be learnt at this batch size. Near 0: its
    gradient is noise.
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

    def after(self, raw: Tensor, unbiased: Tensor, decay: float = SIGNAL_DECAY) -> Signal:
        """The signal after one more refresh with G_kk ``raw`` [K] and M_kk ``unbiased`` [K]. A reward whose M_kk is
        NaN, or that has no gradient, keeps its value."""
        raw, unbiased = raw.to(self.raw), unbiased.to(self.unbiased)
        seen = ~unbiased.isnan() & (raw > 0)
        return Signal(
            torch.where(seen, decay * self.unbiased + (1 - decay) * unbiased, self.unbiased),
            torch.where(seen, decay * self.raw + (1 - decay) * raw, self.raw),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"unbiased": self.unbiased.tolist(), "raw": self.raw.tolist()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Signal:
        return cls(*(torch.tensor(state[key], dtype=torch.float64) for key in ("unbiased", "raw")))
