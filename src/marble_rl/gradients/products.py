"""Inner products of gradients in float64: P (the number of parameters) is large, and rounding errors would add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from marble_rl.devices import in_float64
from marble_rl.types import HALVES

_CHUNK = 1 << 14
"""Parameters at a time; few enough that the float64 copy stays in the processor's cache"""
_CHUNK_OF_A_DEVICE = 1 << 20
"""The same on an accelerator, where every piece costs a few kernel launches"""


@dataclass(frozen=True)
class Products:
    """Inner products of J gradients, float64."""

    gram: Tensor
    """[J, J]"""
    half_gram: Tensor | None
    """[2, 2, J, J]: products of the two halves' gradients; None if one half has no samples"""

    def first(self, k: int) -> Products:
        """The products of the first k gradients."""
        half_gram = self.half_gram
        return Products(self.gram[:k, :k], None if half_gram is None else half_gram[:, :, :k, :k])

    def divided_by(self, square: float) -> Products:
        half_gram = self.half_gram
        return Products(self.gram / square, None if half_gram is None else half_gram / square)


def products_of_halves(first: Tensor, whole: Tensor) -> Tensor:
    """[2, 2, J, J] float64: products of the rows of ``first`` and of ``whole - first`` [J, P]."""
    rows = len(first)
    products = _zeros(first, HALVES, HALVES, rows, rows)
    for a, both in zip(_pieces(first), _pieces(whole), strict=True):
        b = both - a
        products[0, 0].addmm_(a, a.T)
        products[0, 1].addmm_(a, b.T)
        products[1, 1].addmm_(b, b.T)
    products[1, 0] = products[0, 1].T
    return products


def products_between(first: Tensor, second: Tensor) -> Tensor:
    """[I, J] float64: products of the rows of ``first`` [I, P] with those of ``second`` [J, P]."""
    products = _zeros(first, len(first), len(second))
    for a, b in zip(_pieces(first), _pieces(second), strict=True):
        products.addmm_(a, b.T)
    return products


def gram(g: Tensor) -> Tensor:
    """[J, J] float64: Gram matrix of the rows of ``g`` [J, P]."""
    products = _zeros(g, len(g), len(g))
    for piece in _pieces(g):
        products.addmm_(piece, piece.T)
    return products


def _pieces(g: Tensor) -> Iterator[Tensor]:
    """Blocks [J, <= chunk] float64."""
    chunk = _CHUNK if g.device.type == "cpu" else _CHUNK_OF_A_DEVICE
    for start in range(0, g.shape[1], chunk):
        yield in_float64(g[:, start : start + chunk])


def _zeros(g: Tensor, *shape: int) -> Tensor:
    """Where the products of pieces of ``g`` are added up."""
    return in_float64(g[:0, :0]).new_zeros(shape)
