"""Stage 6: one policy gradient per reward, all on the same samples, noise and timesteps.

    g_k    = grad mean_i A_ki slope_i                         slope part: what the QP balances
    shared = grad mean_i base_i                               the same for every reward: stays outside the QP

Decided here: the gradient of ``base`` (a pull towards the old policy, zero on-policy) is not part of g_k; on-policy
this is the paper's method exactly.

The samples are kept apart in two halves of the prompt groups. With S_h the sum over half h and n_h its rows,
g = (S_1 + S_2) / (n_1 + n_2) and h_i = S_i / n_i. Because the halves are independent,

    M_kl = (h1_k . h2_l + h2_k . h1_l) / 2                                  (docs/method.md, section 6)

is an unbiased estimate of mu_k . mu_l, which the Gram matrix of g, full of each reward's own noise, is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marble_rl.types import HALVES

_GRAM_CHUNK = 1 << 20


@dataclass(frozen=True)
class RewardGradients:
    """Gradients of J advantage columns over P parameters, flattened in the order of ``params``."""

    g: Tensor
    """[J, P]: slope parts only."""
    shared: Tensor
    """[P]: gradient of mean ``base``."""
    norms: Tensor
    """[J] float64"""
    gram: Tensor
    """[J, J] float64: g g^T."""
    cross: Tensor | None
    """[J, J] float64: unbiased products, or None where one half holds no samples."""
    half_gram: Tensor | None
    """[2, 2, J, J] float64: products of the halves' own gradients; its off-diagonal blocks make ``cross``."""


class GradientAccumulator:
    """Sums per-column gradients over micro-batches and timesteps: add(...) as often as you like, then finish().

    Works by one backward pass per column and half that occur in a micro-batch; a column that is zero throughout it
    costs nothing. With J = 0 columns only ``base`` is differentiated: an ordinary training step.
    """

    def __init__(self, columns: int, params: Iterable[Tensor]) -> None:
        self.params = tuple(params)
        if not self.params:
            raise ValueError("params is empty: there is nothing to differentiate")
        self.columns = columns
        sizes = [p.numel() for p in self.params]
        first = self.params[0]
        # Row j of half h is the gradient of column j; the last row is the shared part.
        self._sums = torch.zeros(HALVES, columns + 1, sum(sizes), dtype=first.dtype, device=first.device)
        self._views = [
            [[chunk.view_as(p) for chunk, p in zip(row.split(sizes), self.params, strict=True)] for row in half]
            for half in self._sums
        ]
        self._rows = [0] * HALVES

    def add(
        self,
        slope: Tensor | None,
        base: Tensor | None,
        advantages: Tensor | None,
        halves: Tensor | None = None,
    ) -> None:
        """Add the rows of one micro-batch: slope [B], base [B], advantages [B, J], halves [B] of 0 or 1."""
        rows = slope if slope is not None else base
        if rows is None:
            raise ValueError("give slope, base or both")
        wanted = (len(rows), self.columns)
        if advantages is not None and tuple(advantages.shape) != wanted:
            raise ValueError(f"advantages must be {list(wanted)}, got {list(advantages.shape)}")
        half_of = torch.zeros(len(rows), dtype=torch.long) if halves is None else halves.to("cpu", torch.long)
        if half_of.shape != (len(rows),) or not ((half_of == 0) | (half_of == 1)).all():
            raise ValueError(f"halves must be [{len(rows)}] of 0 or 1, got {halves}")
        members = [half_of == h for h in range(HALVES)]
        passes: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        for h, member in enumerate(members):
            self._rows[h] += int(member.sum())
            mask = member.to(rows)
            if slope is not None and advantages is not None:
                for j in range(self.columns):
                    passes.append((slope, advantages[:, j].detach().to(slope) * mask, self._views[h][j]))
            if base is not None:
                passes.append((base, mask, self._views[h][-1]))
        passes = [p for p in passes if p[1].count_nonzero() > 0]
        for i, (output, cotangent, into) in enumerate(passes):
            self._backward(output, cotangent, into, last=i == len(passes) - 1)

    def finish(self) -> RewardGradients:
        """Means over all rows added, and their products."""
        total = sum(self._rows)
        if total == 0:
            raise ValueError("no rows were added")
        mean = self._sums.sum(0) / total
        g, shared = mean[:-1], mean[-1]
        gram = _products(g)
        half_gram = cross = None
        if all(self._rows):
            counts = torch.tensor(self._rows, dtype=torch.float64, device=mean.device)
            stacked = self._sums[:, :-1].flatten(0, 1)
            half_gram = (
                _products(stacked).view(HALVES, self.columns, HALVES, self.columns).transpose(1, 2)
                / counts[:, None, None, None]
                / counts[None, :, None, None]
            )
            cross = (half_gram[0, 1] + half_gram[1, 0]) / 2
        return RewardGradients(g, shared, gram.diagonal().sqrt(), gram, cross, half_gram)

    def _backward(self, output: Tensor, cotangent: Tensor, into: list[Tensor], last: bool) -> None:
        gradients = torch.autograd.grad(
            output, self.params, grad_outputs=cotangent, retain_graph=not last, allow_unused=True
        )
        for total, gradient in zip(into, gradients, strict=True):
            if gradient is not None:
                total += gradient


def reward_gradients(
    slope: Tensor,
    base: Tensor | None,
    advantages: Tensor,
    params: Sequence[Tensor],
    *,
    halves: Tensor | None = None,
    method: Literal["passes"] = "passes",
) -> RewardGradients:
    """Per-reward gradients of one batch: slope [N], base [N], advantages [N, J] -> g [J, P], shared [P], products.

    J may exceed the number of rewards: further columns are probes. ``halves`` [N] of 0 or 1 says which half of the
    prompt groups a sample belongs to; without it ``cross`` is None.
    """
    if method != "passes":
        raise ValueError(f"method must be 'passes', got {method!r}")
    if slope.ndim != 1 or advantages.ndim != 2 or len(advantages) != len(slope):
        raise ValueError(
            f"slope must be [N] and advantages [N, J], got {tuple(slope.shape)} and {tuple(advantages.shape)}"
        )
    accumulator = GradientAccumulator(advantages.shape[1], params)
    accumulator.add(slope, base, advantages, halves)
    return accumulator.finish()


def _products(rows: Tensor) -> Tensor:
    """rows rows^T in float64, a chunk of parameters at a time: [J, P] -> [J, J]."""
    gram = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for chunk in rows.split(_GRAM_CHUNK, dim=1):
        chunk64 = chunk.to(torch.float64)
        gram += chunk64 @ chunk64.T
    return gram
