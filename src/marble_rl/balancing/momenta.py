"""One momentum per reward: m_k <- b m_k + (1 - b) g_k, an average over about (1 + b) / (1 - b) batches.

One batch's gradient is mostly noise; a momentum holds the signal. There is no bias correction: its factor is the same
for all rewards and cancels.

They are stored in bfloat16, half of the memory: they only decide the weights of the gradients, and their cosines come
out within about 0.001. Sums and products are computed in float32 and float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.gradients.products import gram, products_between

DECAY = 0.9
"""b by default."""
STORED_AS = torch.bfloat16


@dataclass(frozen=True)
class MomentumProducts:
    """Inner products of the momenta m before a batch and of its gradients g, float64 on the CPU."""

    momenta: Tensor
    """[K, K]: m_k . m_l"""
    mixed: Tensor
    """[K, K]: m_k . g_l"""
    batch: Tensor
    """[K, K]: g_k . g_l"""
    decay: float

    @property
    def after(self) -> Tensor:
        """[K, K]: Gram matrix of the momenta after the batch. No momentum is changed or copied for it."""
        b = self.decay
        return b**2 * self.momenta + b * (1 - b) * (self.mixed + self.mixed.T) + (1 - b) ** 2 * self.batch


class Momenta:
    """The momenta of K rewards. `products_with` changes nothing; `commit` adds a batch."""

    def __init__(self, rewards: Sequence[str], decay: float = DECAY, stored_as: torch.dtype = STORED_AS) -> None:
        self.rewards = tuple(rewards)
        self.decay = decay
        self.stored_as = stored_as
        self.values: Tensor | None = None
        """[K, P]; None before the first batch"""

    def products(self) -> Tensor | None:
        """[K, K] float64 on the CPU: Gram matrix of the momenta; None before the first batch."""
        return None if self.values is None else gram(self.values).cpu()

    def products_with(self, g: Tensor, batch: Tensor | None = None) -> MomentumProducts:
        """Their products with the gradients g [K, P] of a batch. ``batch``: the Gram matrix of g, if it is known."""
        if g.ndim != 2 or len(g) != len(self.rewards):
            raise ValueError(f"gradients must be [{len(self.rewards)}, P], one row per reward, got {tuple(g.shape)}")
        batch = (gram(g) if batch is None else batch).cpu()
        values = self.on(g.device)
        if values is None:
            return MomentumProducts(torch.zeros_like(batch), torch.zeros_like(batch), batch, self.decay)
        return MomentumProducts(gram(values).cpu(), products_between(values, g).cpu(), batch, self.decay)

    def on(self, device: torch.device) -> Tensor | None:
        """The momenta, moved to the device of the gradients: those of a checkpoint are read to the CPU."""
        self.values = None if self.values is None else self.values.to(device)
        return self.values

    @torch.no_grad()
    def commit(self, g: Tensor, off: Sequence[str] = ()) -> None:
        """m_k <- b m_k + (1 - b) g_k, in place; the momenta of rewards that are ``off`` are forgotten."""
        values = self.on(g.device)
        if values is None:
            values = self.values = torch.zeros_like(g, dtype=self.stored_as)
        for name, momentum, gradient in zip(self.rewards, values, g, strict=True):
            if name in off:
                momentum.zero_()
            else:
                momentum.copy_(self.decay * momentum.to(gradient) + (1 - self.decay) * gradient)

    def state_dict(self) -> dict[str, Tensor]:
        """The momenta [P] by reward; empty before the first batch."""
        return {} if self.values is None else dict(zip(self.rewards, self.values, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state and set(state) != set(self.rewards):
            raise ValueError(f"the state is of the rewards {sorted(state)}, not of {sorted(self.rewards)}")
        self.values = torch.stack([state[name] for name in self.rewards]).to(self.stored_as) if state else None
