"""Products of gradients, plain or in the metric of the optimizer.

AdamW does not step along -d. Up to momentum it steps along -P^-1 d, with P = diag(sqrt(v_hat) + eps), so that to first
order the loss of reward k changes by -g_k^T P^-1 d. In the inner product

    <a, b> = a^T P^-1 b                                                     (docs/method.md, section 7)

this is a product like any other: unit length, the min-norm point and its guarantee hold for the step that is taken once
the Gram matrix is that of the P^-1/2 g_k. An experiment, ours: ``balance.metric: adam``.

Decided here: P is what AdamW divides by in this very step, so v takes in this batch, as AdamW does before it divides.
Its gradient depends on the coefficients that are being looked for; in its place stands a size that does not,

    u^2 = mean_k g_k^2 + shared^2 ,        v' = b2 v + (1 - b2) u^2 ,        P = diag(sqrt(v'_hat) + eps)

by parameter. Before the first step, when there is no v, P is u alone; a parameter that had no gradient so far (half of
a fresh LoRA has none in its first step) is divided by its own size, not by eps. A sum of the g_k would not do: where
they cancel it is next to nothing, and rounding errors would decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.types import HALVES

_CHUNK = 1 << 14
"""Parameters at a time; small enough that the float64 copy stays in the processor's cache."""


@dataclass(frozen=True)
class Metric:
    """How to find P once a batch's gradients are there."""

    rewards: int
    """How many of the columns, the first ones, are rewards; others are probes."""
    diagonal: Callable[[Tensor], Tensor]
    """Size u of a gradient [P] -> diag P [P], all of it positive: `Updater.preconditioner`."""

    def of_scaled(self, scale: float) -> Metric:
        """The same P where all gradients come ``scale`` times as large."""
        return self if scale == 1.0 else Metric(self.rewards, lambda size: self.diagonal(size / scale))


@dataclass(frozen=True)
class Products:
    """Inner products of J gradients, float64."""

    gram: Tensor
    """[J, J]"""
    cross: Tensor | None
    """[J, J]: unbiased, or None where one half of the batch holds no samples."""
    half_gram: Tensor | None
    """[2, 2, J, J]: of the halves' own gradients."""

    def first(self, k: int) -> Products:
        """Of the first k gradients alone."""
        cross, half_gram = self.cross, self.half_gram
        return Products(
            self.gram[:k, :k],
            None if cross is None else cross[:k, :k],
            None if half_gram is None else half_gram[:, :, :k, :k],
        )

    def divided_by(self, square: float) -> Products:
        cross, half_gram = self.cross, self.half_gram
        return Products(
            self.gram / square,
            None if cross is None else cross / square,
            None if half_gram is None else half_gram / square,
        )


def gradient_size(rewards: Iterable[Tensor], shared: Tensor) -> Tensor:
    """[P]: u = sqrt(mean_k g_k^2 + shared^2) from the g_k [P], one at a time."""
    total, count = torch.zeros_like(shared), 0
    for g in rewards:
        total.addcmul_(g, g)
        count += 1
    return (total / count + shared**2).sqrt()


def mean_products(sums: Tensor, rows: list[int]) -> Products:
    """Of the means, from [2, 2, J, J] products of sums over the ``rows`` of each half."""
    gram = sums.sum((0, 1)) / sum(rows) ** 2
    if not all(rows) or not len(gram):
        return Products(gram, None, None)
    counts = torch.tensor(rows, dtype=torch.float64, device=sums.device)
    half_gram = sums / counts[:, None, None, None] / counts[None, :, None, None]
    return Products(gram, (half_gram[0, 1] + half_gram[1, 0]) / 2, half_gram)


def half_products(first: Tensor, second: Tensor, diagonal: Tensor | None = None) -> Tensor:
    """[2, 2, J, J] float64: products of the rows of ``first`` and ``second`` [J, P]; plain without ``diagonal`` [P]."""
    rows = len(first)
    products = torch.zeros(HALVES, HALVES, rows, rows, dtype=torch.float64, device=first.device)
    for a, b in zip(_pieces(first, diagonal), _pieces(second, diagonal), strict=True):
        products[0, 0].addmm_(a, a.T)
        products[0, 1].addmm_(a, b.T)
        products[1, 1].addmm_(b, b.T)
    products[1, 0] = products[0, 1].T
    return products


def gram(g: Tensor, diagonal: Tensor | None = None) -> Tensor:
    """[J, J] float64 of the rows of ``g`` [J, P]; plain without ``diagonal`` [P]."""
    products = torch.zeros(len(g), len(g), dtype=torch.float64, device=g.device)
    for piece in _pieces(g, diagonal):
        products.addmm_(piece, piece.T)
    return products


def _pieces(g: Tensor, diagonal: Tensor | None) -> Iterator[Tensor]:
    """[J, <= chunk] float64: stretches of P^-1/2 g."""
    for start in range(0, g.shape[1], _CHUNK):
        piece = g[:, start : start + _CHUNK].to(torch.float64)
        yield piece if diagonal is None else piece / diagonal[start : start + _CHUNK].to(torch.float64).sqrt()
