"""Fair balancing: proportional fairness between one momentum per reward (docs/method.md, section 7).

    m_k <- b m_k + (1 - b) g_k                            one momentum per reward: an average over about 19 batches
    a    : (U_e a)_k = pi_k / a_k                         U: Gram matrix of the unit momenta (proportional.py)
    w_k  = a_k nbar / (K ||m_k||)                         nbar: mean of the ||m_j||; nbar / ||m_k|| <= 10
    update = sum_k w_k g_k

A batch's gradient is mostly noise, so a rule that looks at one batch balances noise. The momenta are where the signal
is. Between them the rule maximises the product of the progress of all rewards: a direction that doubles the progress of
one reward may cost another one at most half of its own. It does not depend on the rewards' scales, and rewards that
nearly agree do not outvote a single one: n of them together count sqrt(n).

A reward without a gradient in a batch keeps its momentum, which decays; one that never had a gradient is left out. The
length of sum_k a_k mhat_k is not normalised away: where the rewards oppose each other, the step shrinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.balancing.base import Balancer, Combination, GradientSettings, Weighing, check_weights
from marble_rl.balancing.harmonizer import MAX_BOOST
from marble_rl.balancing.proportional import proportional_shares
from marble_rl.gradients.accumulate import RewardGradients


class FairSettings(GradientSettings):
    """Proportional fairness between one momentum per reward, in every step."""

    type: str = "fair"
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the momenta: what the rule sees is an average over about (1 + momentum) / (1 - momentum) batches."""
    ridge: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    """How far the momenta count as orthogonal: it bounds the shares where rewards oppose each other."""


@dataclass(frozen=True)
class MomentumStep:
    """What `commit` adds to the momenta."""

    g: Tensor
    """[K, P]"""
    shares: Tensor
    """[K] float64: a, 0 for a reward without a momentum"""


class Fair(Balancer):
    Settings = FairSettings
    label = "fair"
    about = "at once, each with its fair share of every step"

    def __init__(self, settings: Any, rewards: Sequence[str], **context: Any) -> None:
        super().__init__(settings, rewards, **context)
        self._momenta: Tensor | None = None
        """[K, P], without bias correction: one factor for all of them, which cancels"""

    @classmethod
    def check(cls, settings: Any, rewards: Sequence[str]) -> None:
        check_weights(settings.probe_weights, rewards, "balance.probe_weights")

    def needs_gradients(self, step: int) -> bool:
        return True

    def combine(self, step: int, scored: Scored) -> Combination:
        raise AssertionError("fair needs one gradient per reward in every step")

    def weigh(self, step: int, gradients: RewardGradients) -> Weighing:
        gram = self.momentum_products(gradients)
        norms = gram.diagonal().clamp_min(0.0).sqrt()
        shares = self._shares(gram, norms)
        return Weighing(weights_from(shares, norms), state=MomentumStep(gradients.g, shares))

    def momentum_products(self, gradients: RewardGradients) -> Tensor:
        """[K, K] float64: Gram matrix of the momenta after this batch. They are not computed: it follows from the
        products of old momenta and new gradients."""
        b, gram = self.settings.momentum, gradients.gram.to("cpu", torch.float64)
        if self._momenta is None:
            return (1 - b) ** 2 * gram
        m, g = self._momenta, gradients.g
        old = (m.double() @ m.double().T).cpu()
        mixed = (m.double() @ g.double().T).cpu()
        return b**2 * old + b * (1 - b) * (mixed + mixed.T) + (1 - b) ** 2 * gram

    def _shares(self, gram: Tensor, norms: Tensor) -> Tensor:
        active = norms > 0
        shares = torch.zeros_like(norms)
        if active.any():
            n = norms[active]
            shares[active] = self.solve(gram[active][:, active] / n[:, None] / n[None, :])
        return shares

    def solve(self, unit: Tensor) -> Tensor:
        """[K] shares for the Gram matrix of unit momenta [K, K]."""
        return proportional_shares(unit, self.settings.ridge).shares

    def weights_for(self, gram: Tensor) -> Tensor:
        norms = gram.diagonal().clamp_min(0.0).sqrt()
        return weights_from(self._shares(gram, norms), norms)

    def commit(self, state: MomentumStep) -> None:
        b = self.settings.momentum
        if self._momenta is None:
            self._momenta = torch.zeros_like(state.g)
        self._momenta.mul_(b).add_(state.g, alpha=1 - b)


def weights_from(shares: Tensor, norms: Tensor) -> Tensor:
    """[K]: w_k = a_k nbar / (K ||m_k||) over the rewards with a momentum; 0 for the others."""
    active = norms > 0
    weights = torch.zeros_like(norms)
    n = norms[active]
    weights[active] = shares[active] * (n.mean() / n).clamp_max(MAX_BOOST) / len(n) if len(n) else n
    return weights
