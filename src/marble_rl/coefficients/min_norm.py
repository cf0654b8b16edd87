"""The min-norm point of a convex hull, from the Gram matrix alone.

    alpha* = argmin  alpha^T G alpha    subject to  alpha >= 0,  sum(alpha) = 1  (docs/method.md, section 3, step 4)

With X any factor of G = X^T X this is Wolfe's min-norm point problem. It is solved exactly, in homogenised form, as
one non-negative least-squares problem (Lawson & Hanson 1974, "least distance programming"):

    u* = argmin_{u >= 0}  ||X u||^2 + (1^T u - 1)^2 ,    alpha* = u* / sum(u*)

The active-set method ends after finitely many steps at the optimum, also for singular, duplicate and opposed
gradients, where Frank-Wolfe iterations stall.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class MinNorm:
    """Solution of the simplex QP."""

    alpha: Tensor
    """[K], on the probability simplex; dtype and device of the Gram matrix given."""
    norm: float
    """||sum_k alpha_k g_k||: the length of the min-norm point."""
    kkt_residual: float
    """max(0, alpha^T G alpha - min_k (G alpha)_k) / mean(diag G). Zero at the optimum."""


def min_norm(gram: Tensor) -> MinNorm:
    """Solve the simplex QP for a Gram matrix [K, K] of any dtype, on any device; computed in float64 on the CPU."""
    from scipy.optimize import nnls

    g = _as_gram(gram)
    k = len(g)
    scale = np.trace(g) / k
    if scale == 0.0:  # every gradient is zero: every point of the simplex is a solution
        return MinNorm(torch.full((k,), 1.0 / k, dtype=gram.dtype, device=gram.device), 0.0, 0.0)

    unit = g / scale
    eigenvalues, eigenvectors = np.linalg.eigh(unit)
    factor = np.sqrt(np.clip(eigenvalues, 0.0, None))[:, None] * eigenvectors.T
    u, _ = nnls(np.vstack([factor, np.ones(k)]), np.append(np.zeros(k), 1.0), maxiter=100 * k)
    alpha = u / u.sum()

    g_alpha = unit @ alpha
    squared_norm = float(alpha @ g_alpha)
    return MinNorm(
        alpha=torch.as_tensor(alpha).to(dtype=gram.dtype, device=gram.device),
        norm=float(np.sqrt(max(squared_norm, 0.0) * scale)),
        kkt_residual=max(0.0, squared_norm - float(g_alpha.min())),
    )


def _as_gram(gram: Tensor) -> npt.NDArray[np.float64]:
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] == 0:
        raise ValueError(f"gram must be a square matrix [K, K] with K >= 1, got shape {tuple(gram.shape)}")
    g: npt.NDArray[np.float64] = gram.detach().to("cpu", torch.float64).numpy()
    if not np.isfinite(g).all():
        raise ValueError("gram holds NaN or infinite values: a gradient was not finite")
    if (np.diag(g) < 0).any():
        raise ValueError("gram has a negative diagonal entry: it is not a Gram matrix")
    symmetric: npt.NDArray[np.float64] = (g + g.T) / 2
    return symmetric
