"""Inner products of gradients, Euclidean or in the metric of the optimizer.

AdamW does not step along -d. Up to momentum it steps along -P^-1 d. P = diag(sqrt(v_hat) + eps) is its preconditioner.
(In shapes, [P] is the number of parameters.) To first order, this step changes the loss of reward k by -g_k^T P^-1 d.
Up to its sign, that is an inner product of g_k and d:

    <a, b> = a^T P^-1 b                                                     (docs/method.md, section 7)

So the balancing rule works on the Gram matrix of this product, which is that of the vectors P^-1/2 g_k. Its guarantee
then holds for the step that AdamW takes, not for a step along -d. This is our experiment: ``balance.metric: adam``.

Our choice of P: AdamW updates v with the gradient of the step before it divides by sqrt(v). That gradient depends on
the coefficients, which are not known yet. We put u in its place, which does not depend on them. For each parameter:

    u^2 = mean_k g_k^2 + shared^2 ,        v' = b2 v + (1 - b2) u^2 ,        P = diag(sqrt(v'_hat) + eps)

Before the first step v is 0, and P is u (+ eps). A parameter whose gradients were all 0 so far (half of a fresh LoRA in
its first step) is thus divided by about the size of its own gradient, not by eps. The sum of the g_k would not do for
u: where the g_k cancel, it is almost 0, and rounding errors would decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.types import HALVES

_CHUNK = 1 << 14
"""Parameters at a time; few enough that the float64 copy stays in the processor's cache"""


@dataclass(frozen=True)
class Metric:
    """How to compute P from the gradients of a batch."""

    rewards: int
    """Number of columns that are rewards. They come first; the others are probes."""
    diagonal: Callable[[Tensor], Tensor]
    """From u [P] to the diagonal of P [P], all positive: `Updater.preconditioner`"""

    def of_scaled(self, scale: float) -> Metric:
        """The same P from gradients that are ``scale`` times as large."""
        return self if scale == 1.0 else Metric(self.rewards, lambda size: self.diagonal(size / scale))


@dataclass(frozen=True)
class Products:
    """Inner products of J gradients, float64."""

    gram: Tensor
    """[J, J]"""
    cross: Tensor | None
    """[J, J]: unbiased products; None if one half of the batch has no samples"""
    half_gram: Tensor | None
    """[2, 2, J, J]: products of the two halves' gradients; None if one half has no samples"""

    def first(self, k: int) -> Products:
        """The products of the first k gradients."""
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
    """Products of mean gradients, from the products [2, 2, J, J] of the two halves' summed gradients. ``rows``: the
    number of rows of each half."""
    gram = sums.sum((0, 1)) / sum(rows) ** 2
    if not all(rows) or not len(gram):
        return Products(gram, None, None)
    counts = torch.tensor(rows, dtype=torch.float64, device=sums.device)
    half_gram = sums / counts[:, None, None, None] / counts[None, :, None, None]
    return Products(gram, (half_gram[0, 1] + half_gram[1, 0]) / 2, half_gram)


def half_products(first: Tensor, second: Tensor, diagonal: Tensor | None = None) -> Tensor:
    """[2, 2, J, J] float64: products of the rows of ``first`` and ``second`` [J, P]. With ``diagonal`` [P], in the
    metric; without it, Euclidean."""
    rows = len(first)
    products = torch.zeros(HALVES, HALVES, rows, rows, dtype=torch.float64, device=first.device)
    for a, b in zip(_pieces(first, diagonal), _pieces(second, diagonal), strict=True):
        products[0, 0].addmm_(a, a.T)
        products[0, 1].addmm_(a, b.T)
        products[1, 1].addmm_(b, b.T)
    products[1, 0] = products[0, 1].T
    return products


def gram(g: Tensor, diagonal: Tensor | None = None) -> Tensor:
    """[J, J] float64: Gram matrix of the rows of ``g`` [J, P]. With ``diagonal`` [P], in the metric; without it,
    Euclidean."""
    products = torch.zeros(len(g), len(g), dtype=torch.float64, device=g.device)
    for piece in _pieces(g, diagonal):
        products.addmm_(piece, piece.T)
    return products


def _pieces(g: Tensor, diagonal: Tensor | None) -> Iterator[Tensor]:
    """Blocks [J, <= _CHUNK] float64 of P^-1/2 g, or of g without ``diagonal``."""
    for start in range(0, g.shape[1], _CHUNK):
        piece = g[:, start : start + _CHUNK].to(torch.float64)
        yield piece if diagonal is None else piece / diagonal[start : start + _CHUNK].to(torch.float64).sqrt()
