"""The two halves of a batch's prompt groups, measured against each other while their sum is made.

With S_1, S_2 the sums of gradients over the halves and n_1, n_2 their numbers of rows, each half has its own gradient
a = S_1 / n_1, b = S_2 / n_2. The halves are independent, so

    M_kl = (a_k . b_l + b_k . a_l) / 2                                      (docs/method.md, section 6)

is an unbiased estimate of mu_k . mu_l, with mu_k = E[g_k]. The Gram matrix of g is biased by noise. Only S_1 + S_2
needs to be kept whole; of S_1 every `SAMPLED`-th parameter is enough to estimate M, which is only logged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marble_rl.gradients.products import products_of_halves

SAMPLED = 7
"""A trainer compares halves on one in so many parameters. Odd and prime, so that all rows and columns of the layers'
matrices are in the sample."""


def buffer_numbers(columns: int, parameters: int, halves_on: int) -> int:
    """Numbers that the gradients of so many columns take, with the shared one. ``halves_on``: as in
    `GradientAccumulator`."""
    sample = columns * len(range(0, parameters, halves_on)) if halves_on else 0
    return (columns + 1) * parameters + sample


class Halves:
    """Keeps a sample of the first half's part of ``sums`` [J, P] in ``first`` [J, P / every]."""

    def __init__(self, sums: Tensor, first: Tensor, every: int) -> None:
        self._sums = sums
        self._first = first
        self._every = every
        self._half = 0

    @property
    def _sample(self) -> Tensor:
        """[J, P / every]"""
        return self._sums[:, :: self._every]

    def enter(self, half: int) -> None:
        """Rows of this half come next."""
        if half != self._half:
            # What is added between entering the first half and leaving it is the first half's.
            self._first.add_(self._sample, alpha=1 if half else -1)
            self._half = half

    def products(self, rows: list[int]) -> Tensor | None:
        """[2, 2, J, J] float64: products of a and b, from the sums over ``rows`` of each half; None if one has no
        rows."""
        self.enter(1)
        if not all(rows):
            return None
        between = products_of_halves(self._first, self._sample) * (self._sums.shape[1] / self._sample.shape[1])
        counts = torch.tensor(rows, dtype=torch.float64, device=between.device)
        return between / counts[:, None, None, None] / counts[None, :, None, None]
