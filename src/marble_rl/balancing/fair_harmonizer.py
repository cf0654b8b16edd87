"""Fair balancing without a trainer: gradients in, weights out (docs/method.md, section 7).

    m_k <- b m_k + (1 - b) g_k                            one momentum per reward: an average over about 19 batches
    a    : (U_e a)_k = pi_k / a_k                         U: Gram matrix of the unit momenta (proportional.py)
    w_k  = a_k nbar / (K ||m_k||)                         nbar: mean of the ||m_j||; nbar / ||m_k|| <= 10
    update = sum_k w_k g_k

One batch's gradient is mostly noise, so a rule that looks at one batch balances noise; the momenta hold the signal.
Between them the rule maximises the (weighted) product of the progress of all rewards: a direction that gives one reward
twice its progress may cost another one at most half of its own. The scale of a reward does not matter, and rewards that
nearly agree do not outvote a single one: n of them together count sqrt(n).

Decided here:

- The update is made of this batch's gradients, and the optimizer keeps its own momentum. An optimizer whose first moment
  is sum_k w_k m_k was as good in the wind tunnel, not better (docs/tunnel.md).
- A reward without a gradient in a batch keeps its momentum, so the others still do not oppose it. One that has never had
  a gradient is left out; so is one that is switched off, whose momentum is forgotten.
- The length of sum_k a_k mhat_k is not normalised: where rewards oppose each other the step shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.balancing.harmonizer import MAX_BOOST
from marble_rl.balancing.min_norm import min_norm
from marble_rl.balancing.proportional import ProportionalShares, proportional_shares
from marble_rl.gradients.metric import gram, half_products


@dataclass(frozen=True)
class FairShares:
    """What one batch's gradients are weighted by. K rewards."""

    weights: Tensor
    """[K] float64: w, the reward update is sum_k weights_k g_k"""
    shares: Tensor
    """[K] float64: a; 0 for rewards left out"""
    progress: Tensor
    """[K] float64: mhat_k . sum_l a_l mhat_l; below 0 the direction opposes the reward. 0 for rewards left out"""
    momentum_norms: Tensor
    """[K] float64"""
    residual: float
    """Error of the solution (proportional.py)"""
    common: float
    """Length of the min-norm point of the unit momenta; at 0 no direction is good for all of them"""


class FairHarmonizer:
    """Balances K rewards in any training loop by proportional fairness between their momenta. Needs only torch and scipy.

    >>> fair = FairHarmonizer(rewards=["ocr", "aesthetic"])
    >>> weights = fair.update(g).weights                     # g [K, P]: gradient of mean_i A_ki * slope_i, every step
    >>> update = weights.to(g) @ g                           # for the optimizer
    """

    def __init__(
        self,
        rewards: Sequence[str],
        momentum: float = 0.9,
        ridge: float = 0.01,
        priorities: Mapping[str, float] | None = None,
    ) -> None:
        if not rewards or len(set(rewards)) != len(rewards):
            raise ValueError(f"rewards must be a non-empty list of distinct names, got {list(rewards)}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if not 0.0 < ridge <= 1.0:
            raise ValueError(f"ridge must be in (0, 1], got {ridge}")
        unknown = sorted(set(priorities or {}) - set(rewards))
        if unknown:
            raise ValueError(f"priorities names {unknown}, which are not among the rewards {list(rewards)}")
        self.rewards = tuple(rewards)
        self.momentum = momentum
        self.ridge = ridge
        self._priorities = torch.tensor([(priorities or {}).get(name, 1.0) for name in rewards], dtype=torch.float64)
        if not bool((self._priorities > 0).all()) or not bool(torch.isfinite(self._priorities).all()):
            raise ValueError(f"priorities must be positive numbers, got {dict(priorities or {})}")
        self._momenta: Tensor | None = None
        """[K, P], without bias correction: its factor is the same for all and cancels"""

    def update(self, g: Tensor) -> FairShares:
        """Weigh the gradients [K, P] of a batch, and add them to the momenta."""
        result = self.weigh(g)
        self.commit(g)
        return result

    def weigh(self, g: Tensor, off: Sequence[str] = ()) -> FairShares:
        """What `update` would return; changes nothing. Rewards that are ``off`` get nothing and count for nothing."""
        return self.shares_for(self._products_after(g), off)

    def current(self) -> Tensor:
        """[K] float64: the weights that the momenta give without another batch; 1/K each before the first one."""
        if self._momenta is None:
            return torch.full((len(self.rewards),), 1 / len(self.rewards), dtype=torch.float64)
        return self.shares_for(gram(self._momenta).cpu()).weights

    def shares_for(self, products: Tensor, off: Sequence[str] = ()) -> FairShares:
        """For momenta with this Gram matrix [K, K]."""
        norms = products.diagonal().clamp_min(0.0).sqrt()
        active = (norms > 0) & torch.tensor([name not in off for name in self.rewards])
        shares, progress, weights = torch.zeros_like(norms), torch.zeros_like(norms), torch.zeros_like(norms)
        if not active.any():
            return FairShares(weights, shares, progress, norms, residual=0.0, common=0.0)
        n = norms[active]
        unit = products[active][:, active] / n[:, None] / n[None, :]
        solution = self.solve(unit, self._priorities[active])
        shares[active] = solution.shares
        progress[active] = unit @ solution.shares
        weights[active] = solution.shares * (n.mean() / n).clamp_max(MAX_BOOST) / len(n)
        return FairShares(weights, shares, progress, norms, solution.residual, common=min_norm(unit).norm)

    def solve(self, unit: Tensor, priorities: Tensor) -> ProportionalShares:
        """The shares for the Gram matrix of unit momenta [K, K]."""
        return proportional_shares(unit, self.ridge, priorities)

    def _products_after(self, g: Tensor) -> Tensor:
        """[K, K] float64 on the CPU: Gram matrix of the momenta after this batch, from products of the old momenta and
        the new gradients; no momentum is changed or copied."""
        if g.ndim != 2 or len(g) != len(self.rewards):
            raise ValueError(f"gradients must be [{len(self.rewards)}, P], one row per reward, got {tuple(g.shape)}")
        b = self.momentum
        products = half_products(g if self._momenta is None else self._momenta, g).cpu()
        if self._momenta is None:
            return (1 - b) ** 2 * products[1, 1]
        mixed = products[0, 1] + products[1, 0]
        return b**2 * products[0, 0] + b * (1 - b) * mixed + (1 - b) ** 2 * products[1, 1]

    @torch.no_grad()
    def commit(self, g: Tensor, off: Sequence[str] = ()) -> None:
        """m_k <- b m_k + (1 - b) g_k, in place."""
        if self._momenta is None:
            self._momenta = torch.zeros_like(g)
        self._momenta.mul_(self.momentum).add_(g, alpha=1 - self.momentum)
        for k, name in enumerate(self.rewards):
            if name in off:
                self._momenta[k].zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """The momenta [P] by reward; empty before the first batch."""
        return {} if self._momenta is None else dict(zip(self.rewards, self._momenta, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state and set(state) != set(self.rewards):
            raise ValueError(f"the state is of the rewards {sorted(state)}, not of {sorted(self.rewards)}")
        self._momenta = torch.stack([state[name] for name in self.rewards]) if state else None
