"""Fair balancing without a trainer: gradients in, weights out (docs/method.md, section 7).

    m_k <- b m_k + (1 - b) g_k                            one momentum per reward: an average over about 19 batches
    a    : (U_e a)_k = pi_k / a_k                         U: Gram matrix of the unit momenta (proportional.py)
    w_k  = a_k nbar / (K ||m_k||)                         nbar: mean of the ||m_j||; nbar / ||m_k|| <= 10
    update = sum_k w_k g_k  (+ what guards add: guards.py, with d0 = sum_k a_k mhat_k and L = sqrt(K))

One batch's gradient is mostly noise, so a rule that looks at one batch balances noise; the momenta hold the signal.
Between them the rule maximises the (weighted) product of the progress of all rewards: a direction that gives one reward
twice its progress may cost another one at most half of its own. The scale of a reward does not matter, and rewards that
nearly agree do not outvote a single one: n of them together count sqrt(n).

Decided here:

- The update is made of this batch's gradients, and the optimizer keeps its own momentum. An optimizer whose first
  moment is sum_k w_k m_k was as good in the wind tunnel, not better (docs/tunnel.md).
- A reward without a gradient in a batch keeps its momentum, so the others still do not oppose it. One that has never
  had a gradient is left out; so is one that is switched off, whose momentum is forgotten.
- The length of sum_k a_k mhat_k is not normalised: where rewards oppose each other the step shrinks.
- A guard is no objective: it has no share, K and nbar do not count it, and it changes nothing while its multiplier is
  0. Otherwise w_g = lambda_g sqrt(K) nbar / (K ||m_g||), with the same bound of nbar / ||m_g||.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marble_rl.balancing.guards import Pull, pull_of_guards
from marble_rl.balancing.harmonizer import MAX_BOOST
from marble_rl.balancing.min_norm import min_norm
from marble_rl.balancing.momenta import DECAY, STORED_AS, Momenta
from marble_rl.balancing.own_loop import OwnLoop
from marble_rl.balancing.proportional import ProportionalShares, proportional_shares
from marble_rl.gradients.accumulate import RewardGradients


@dataclass(frozen=True)
class FairShares:
    """What one batch's gradients are weighted by. K rewards."""

    weights: Tensor
    """[K] float64: w, the reward update is sum_k weights_k g_k"""
    shares: Tensor
    """[K] float64: a; 0 for rewards left out and for guards"""
    progress: Tensor
    """[K] float64: product of mhat_k and the direction; below 0 it opposes the reward. 0 for rewards left out"""
    momentum_norms: Tensor
    """[K] float64"""
    residual: float
    """Error of the solution (proportional.py)"""
    common: float
    """Length of the min-norm point of the objectives' unit momenta; at 0 no direction is good for all of them"""
    pull: Pull | None = None
    """What the guards add; None without guards"""


class FairHarmonizer(OwnLoop):
    """Balances K rewards in any training loop by proportional fairness between their momenta. Needs torch and scipy.

    >>> fair = FairHarmonizer(rewards=["ocr", "aesthetic"])
    >>> fair.backward([loss_ocr, loss_aesthetic], params)    # in place of loss.backward()

    The parts of `backward`, for other loops:

    >>> weights = fair.update(g).weights                     # g [K, P]: gradient of mean_i A_ki * slope_i, every step
    >>> update = weights.to(g) @ g                           # for the optimizer
    """

    def __init__(
        self,
        rewards: Sequence[str],
        momentum: float = DECAY,
        ridge: float = 0.01,
        priorities: Mapping[str, float] | None = None,
        guards: Sequence[str] = (),
        stored_as: torch.dtype = STORED_AS,
        adv_clip: float = 5.0,
    ) -> None:
        """``stored_as``: dtype of the momenta. ``adv_clip``: bound of the advantages that `backward` gets."""
        if not rewards or len(set(rewards)) != len(rewards):
            raise ValueError(f"rewards must be a non-empty list of distinct names, got {list(rewards)}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if not 0.0 < ridge <= 1.0:
            raise ValueError(f"ridge must be in (0, 1], got {ridge}")
        for what, names in (("priorities", set(priorities or {})), ("guards", set(guards))):
            unknown = sorted(names - set(rewards))
            if unknown:
                raise ValueError(f"{what} names {unknown}, which are not among the rewards {list(rewards)}")
        if adv_clip <= 0:
            raise ValueError(f"adv_clip must be positive, got {adv_clip}")
        self.rewards = tuple(rewards)
        self.adv_clip = adv_clip
        self.momentum = momentum
        self.ridge = ridge
        self._priorities = torch.tensor([(priorities or {}).get(name, 1.0) for name in rewards], dtype=torch.float64)
        if not bool((self._priorities > 0).all()) or not bool(torch.isfinite(self._priorities).all()):
            raise ValueError(f"priorities must be positive numbers, got {dict(priorities or {})}")
        self._guards = {k: name for k, name in enumerate(rewards) if name in guards}
        """Names by place"""
        self.momenta = Momenta(rewards, momentum, stored_as)

    def update(self, g: Tensor, rates: Mapping[str, float] | None = None) -> FairShares:
        """Weigh the gradients [K, P] of a batch, and add them to the momenta."""
        result = self.weigh(g, rates=rates)
        self.commit(g)
        return result

    def weigh(self, g: Tensor, off: Sequence[str] = (), rates: Mapping[str, float] | None = None) -> FairShares:
        """What `update` would return; changes nothing. Rewards that are ``off`` get nothing and count for nothing.
        ``rates``: by guard, how it may change (guards.py); a guard without a rate is free."""
        return self.shares_for(self.momenta.products_with(g).after, off, rates)

    def current(self) -> Tensor:
        """[K] float64: the weights that the momenta give without another batch; 1/K each before the first one."""
        products = self.momenta.products()
        if products is None:
            weights = torch.ones(len(self.rewards), dtype=torch.float64)
            weights[list(self._guards)] = 0.0
            return weights / weights.sum()
        return self.shares_for(products).weights

    def shares_for(
        self, products: Tensor, off: Sequence[str] = (), rates: Mapping[str, float] | None = None
    ) -> FairShares:
        """For momenta with this Gram matrix [K, K]."""
        norms = products.diagonal().clamp_min(0.0).sqrt()
        objectives = [name not in off and k not in self._guards for k, name in enumerate(self.rewards)]
        active = (norms > 0) & torch.tensor(objectives)
        shares, progress, weights = torch.zeros_like(norms), torch.zeros_like(norms), torch.zeros_like(norms)
        if not active.any():
            return FairShares(weights, shares, progress, norms, residual=0.0, common=0.0)
        n = norms[active]
        unit = products[active][:, active] / n[:, None] / n[None, :]
        solution = self.solve(unit, self._priorities[active])
        shares[active] = solution.shares
        progress[active] = unit @ solution.shares
        weights[active] = solution.shares * (n.mean() / n).clamp_max(MAX_BOOST) / len(n)
        result = FairShares(weights, shares, progress, norms, solution.residual, common=min_norm(unit).norm)
        return self._guarded(result, products, len(n), float(n.mean()), rates or {}) if self._guards else result

    def _guarded(
        self, fair: FairShares, products: Tensor, k: int, mean_norm: float, rates: Mapping[str, float]
    ) -> FairShares:
        """With what the guards add to the direction of K objectives."""
        inverse = torch.where(fair.momentum_norms > 0, 1 / fair.momentum_norms, 0.0)
        placed = {place: rates[name] for place, name in self._guards.items() if name in rates}
        pull = pull_of_guards(products, fair.shares * inverse, math.sqrt(k), placed)
        added = pull.multipliers * math.sqrt(k)
        counted = (fair.shares > 0) | torch.tensor([place in self._guards for place in range(len(self.rewards))])
        progress = torch.where(counted, products @ ((fair.shares + added) * inverse) * inverse, 0.0)
        weights = fair.weights + added * (mean_norm * inverse).clamp_max(MAX_BOOST) / k
        return replace(fair, weights=weights, progress=progress, pull=pull)

    def solve(self, unit: Tensor, priorities: Tensor) -> ProportionalShares:
        """The shares for the Gram matrix of unit momenta [K, K]."""
        return proportional_shares(unit, self.ridge, priorities)

    def commit(self, g: Tensor, off: Sequence[str] = ()) -> None:
        """Add a batch to the momenta."""
        self.momenta.commit(g, off)

    def state_dict(self) -> dict[str, Tensor]:
        """The momenta [P] by reward; empty before the first batch."""
        return self.momenta.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.momenta.load_state_dict(state)

    def _coefficients(self) -> Tensor | None:
        return None

    def _weigh(self, gradients: RewardGradients) -> Tensor:
        if self._guards:
            raise ValueError("backward knows no guards: give their rates to update(g, rates)")
        return self.update(gradients.g).weights
