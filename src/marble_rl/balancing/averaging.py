"""Products of the unit gradients, averaged over refreshes.

A batch's cosines are noisy. MARBLE averages alpha*, the solution of the QP; here the products, its input, are averaged.
No balancing rule uses this; `marble diagnose` uses `nearest_gram`.

If a reward has no gradient in some refreshes, the entries of the matrix are averages over different refreshes. Then the
matrix can be indefinite, and is not a Gram matrix of any vectors. `nearest_gram` replaces it by the nearest one that
is.
"""

from __future__ import annotations

from typing import Any

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


class GramMemory:
    """Running means of the Gram matrix of unit gradients and of their unbiased products.

    An entry is averaged over the refreshes in which both rewards had a gradient; its first value is taken as it is.
    """

    def __init__(self, rewards: int, decay: float) -> None:
        self.decay = decay
        self.gram = torch.full((rewards, rewards), float("nan"), dtype=torch.float64)
        self.cross = self.gram.clone()

    @property
    def known(self) -> Tensor:
        """[K] bool: rewards that have had a gradient."""
        return ~self.gram.diagonal().isnan()

    def add(self, unit: Tensor, unit_cross: Tensor | None, active: Tensor) -> None:
        """Add one batch's products [K, K]. Only rows and columns of ``active`` rewards count."""
        both = active[:, None] & active[None, :]
        self._blend(self.gram, unit, both)
        if unit_cross is not None:
            self._blend(self.cross, unit_cross, both)

    def _blend(self, mean: Tensor, new: Tensor, where: Tensor) -> None:
        first = where & mean.isnan()
        mean[first] = new[first]
        mean[where] = self.decay * mean[where] + (1 - self.decay) * new[where]

    def state_dict(self) -> dict[str, Any]:
        return {"gram": _listed(self.gram), "cross": _listed(self.cross)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gram, self.cross = _tensor(state["gram"]), _tensor(state["cross"])


def _listed(matrix: Tensor) -> list[list[float | None]]:
    """JSON has no NaN."""
    return [[None if x != x else x for x in row] for row in matrix.tolist()]


def _tensor(rows: list[list[float | None]]) -> Tensor:
    return torch.tensor([[float("nan") if x is None else x for x in row] for row in rows], dtype=torch.float64)
