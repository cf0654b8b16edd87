"""One momentum per reward: m_k <- b m_k + (1 - b) g_k, an average over about (1 + b) / (1 - b) batches.

One batch's gradient is mostly noise; a momentum holds the signal. There is no bias correction: its factor is the same
for all rewards and cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from marble_rl.gradients.metric import gram, half_products

DECAY = 0.9
"""b by default."""


class Momenta:
    """The momenta of K rewards. `products_after` changes nothing; `commit` adds a batch."""

    def __init__(self, rewards: Sequence[str], decay: float = DECAY) -> None:
        self.rewards = tuple(rewards)
        self.decay = decay
        self.values: Tensor | None = None
        """[K, P]; None before the first batch"""

    def products(self) -> Tensor | None:
        """[K, K] float64 on the CPU: Gram matrix of the momenta; None before the first batch."""
        return None if self.values is None else gram(self.values).cpu()

    def products_after(self, g: Tensor, diagonal: Tensor | None = None) -> Tensor:
        """[K, K] float64 on the CPU: Gram matrix of the momenta after the batch g [K, P], from products of the old
        momenta and the new gradients; no momentum is changed or copied. With ``diagonal`` [P], in that metric."""
        if g.ndim != 2 or len(g) != len(self.rewards):
            raise ValueError(f"gradients must be [{len(self.rewards)}, P], one row per reward, got {tuple(g.shape)}")
        b = self.decay
        products = half_products(g if self.values is None else self.values, g, diagonal).cpu()
        if self.values is None:
            return (1 - b) ** 2 * products[1, 1]
        mixed = products[0, 1] + products[1, 0]
        return b**2 * products[0, 0] + b * (1 - b) * mixed + (1 - b) ** 2 * products[1, 1]

    @torch.no_grad()
    def commit(self, g: Tensor, off: Sequence[str] = ()) -> None:
        """m_k <- b m_k + (1 - b) g_k, in place; the momenta of rewards that are ``off`` are forgotten."""
        if self.values is None:
            self.values = torch.zeros_like(g)
        self.values.mul_(self.decay).add_(g, alpha=1 - self.decay)
        for k, name in enumerate(self.rewards):
            if name in off:
                self.values[k].zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """The momenta [P] by reward; empty before the first batch."""
        return {} if self.values is None else dict(zip(self.rewards, self.values, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state and set(state) != set(self.rewards):
            raise ValueError(f"the state is of the rewards {sorted(state)}, not of {sorted(self.rewards)}")
        self.values = torch.stack([state[name] for name in self.rewards]) if state else None
