"""Products of gradients, averaged over batches, made those of vectors again.

Where a reward has no gradient in some batches, the entries of an averaged matrix come from different batches. It can
then be indefinite: no vectors have these products.
"""

from __future__ import annotations

import torch
from torch import Tensor

INDEFINITE = -1e-10
"""Eigenvalues between this and 0 are rounding errors (unit gradients: the diagonal is 1)."""


def nearest_gram(mean: Tensor) -> Tensor:
    """The positive semidefinite matrix that is nearest to ``mean`` [K, K]: its negative eigenvalues become 0. If there
    are none, ``mean`` itself is returned."""
    eigenvalues, eigenvectors = torch.linalg.eigh(mean)
    if (eigenvalues >= INDEFINITE).all():
        return mean
    factor: Tensor = eigenvectors * eigenvalues.clamp_min(0).sqrt()
    return factor @ factor.T
