"""What fair balancing remembers of earlier batches, measured on the next one: signal and cosines without a second half
of the batch, and without its memory.

The momenta have not seen the noise of the batch that comes next. So

    M_kk = (m_k / c_k) . g_k        c_k: the sum of the weights of the batches in m_k that had a gradient of reward k

estimates the squared norm of reward k's expected gradient without bias, as two halves of a batch do (docs/method.md,
section 6). The direction sum_k w_k m_k, with the weights that the rule takes from the momenta alone, meets gradients
that it was not made of; beside it stands the momentum of the weighted sum's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from marble_rl.balancing.base import Elsewhere
from marble_rl.balancing.momenta import Momenta, MomentumProducts
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.gradients.products import gram, products_between

WEIGHTED_SUM = "probe:weighted_sum"
"""No reward can have this name."""


class EarlierBatches:
    """c_k, and the momentum of the weighted sum's gradient."""

    def __init__(self, rewards: Sequence[str], decay: float) -> None:
        self.rewards = tuple(rewards)
        self.decay = decay
        self.counted = torch.zeros(len(rewards), dtype=torch.float64)
        """[K]: c"""
        self.weighted_sum = Momenta([WEIGHTED_SUM], decay)

    def measured_on(self, gradients: RewardGradients, products: MomentumProducts, weights: Tensor) -> Elsewhere | None:
        """``weights`` [K]: those that the rule takes from the momenta before this batch. None before a second one."""
        if not self.counted.any():
            return None
        known = (self.counted > 0) & (products.batch.diagonal() > 0)
        directions, squares = [products.mixed.T @ weights], [weights @ products.momenta @ weights]
        weighted_sum = self.weighted_sum.on(gradients.g.device)
        if weighted_sum is not None:
            directions.append(products_between(weighted_sum, gradients.g)[0].cpu())
            squares.append(gram(weighted_sum)[0, 0].cpu())
        else:
            directions.append(torch.zeros_like(weights))
            squares.append(torch.zeros((), dtype=torch.float64))
        unbiased = torch.where(known, products.mixed.diagonal() / self.counted, torch.nan)
        return Elsewhere(unbiased, torch.stack(directions), torch.stack(squares))

    def commit(self, present: Tensor, probe: Tensor | None, off: Sequence[str]) -> None:
        """``present`` [K]: rewards with a gradient in the batch. ``probe`` [1, P]: the weighted sum's gradient."""
        self.counted = self.decay * self.counted + (1 - self.decay) * present.to(self.counted)
        self.counted[[name in off for name in self.rewards]] = 0.0
        if probe is not None:
            self.weighted_sum.commit(probe)

    def tensors(self) -> dict[str, Tensor]:
        return self.weighted_sum.state_dict()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.weighted_sum.load_state_dict({name: t for name, t in tensors.items() if name == WEIGHTED_SUM})

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counted = torch.tensor(state["counted"], dtype=torch.float64)
