"""The min-norm point of a convex hull, from the Gram matrix alone.

    alpha* = argmin  alpha^T G alpha    subject to  alpha >= 0,  sum(alpha) = 1  (docs/method.md, section 3, step 4)

With X any factor of G = X^T X this is Wolfe's min-norm point problem. It is solved exactly, in homogenised form, as
one non-negative least-squares problem (Lawson & Hanson 1974, "least distance programming"):

    u* = argmin_{u >= 0}  ||X u||^2 + (1^T u - 1)^2 ,    alpha* = u* / sum(u*)

The active-set method ends after finitely many steps at the optimum, also for singular, duplicate and opposed
gradients, where Frank-Wolfe iterations stall.

The min-norm point d* = X alpha* is unique, but alpha* need not be: two identical gradients can share their weight in
any way. Among equal optima we take the alpha nearest to uniform, so that the result does not depend on the order of the
rewards. The paper leaves this open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Vector = npt.NDArray[np.float64]
SINGULAR = 1e-9
"""If the smallest eigenvalue of a Gram matrix with mean diagonal 1 is below this, alpha may not be unique."""
HEAVY = 1e7
"""Weight of the rows that stand for equality constraints in `_most_even`"""
ROUNDING = 1e-14
"""By how much rounding may make a solution worse"""
OPTIMAL = 1e-12
"""Residual below which a solution is taken as exact."""
ATTEMPTS = 16
"""Most orders of the columns that `_min_norm_point` tries"""


@dataclass(frozen=True)
class MinNorm:
    """Solution of the simplex QP."""

    alpha: Tensor
    """[K], on the probability simplex; dtype (if a float) and device of the Gram matrix given."""
    norm: float
    """||sum_k alpha_k g_k||: the length of the min-norm point."""
    kkt_residual: float
    """max(0, alpha^T G alpha - min_k (G alpha)_k) / mean(diag G). Zero at the optimum."""


def min_norm(gram: Tensor) -> MinNorm:
    """Solve the simplex QP for a Gram matrix [K, K] of any dtype, on any device; computed in float64 on the CPU."""
    g = as_gram(gram)
    k = len(g)
    dtype = gram.dtype if gram.is_floating_point() else torch.float64
    scale = np.trace(g) / k
    if scale == 0.0:  # every gradient is zero: every point of the simplex is a solution
        return MinNorm(torch.full((k,), 1.0 / k, dtype=dtype, device=gram.device), 0.0, 0.0)

    scaled = g / scale
    eigenvalues, eigenvectors = np.linalg.eigh(scaled)
    span = eigenvalues > SINGULAR * 1e-5
    factor = np.sqrt(eigenvalues[span])[:, None] * eigenvectors[:, span].T
    alpha = _min_norm_point(factor, scaled)
    if eigenvalues[0] < SINGULAR:
        alpha = _most_even(alpha, scaled, factor)

    squared_norm, residual = _optimality(alpha, scaled)
    return MinNorm(
        alpha=torch.as_tensor(alpha).to(dtype=dtype, device=gram.device),
        norm=float(np.sqrt(max(squared_norm, 0.0) * scale)),
        kkt_residual=residual,
    )


def equal_shares(gram: Tensor) -> MinNorm:
    """alpha = 1/K each, with its norm and residual: a baseline, in general not the solution of the QP."""
    g = as_gram(gram)
    k, scale = len(g), np.trace(g) / len(g)
    alpha = np.full(k, 1.0 / k)
    squared_norm, residual = _optimality(alpha, g / scale) if scale else (0.0, 0.0)
    return MinNorm(torch.as_tensor(alpha), float(np.sqrt(max(squared_norm, 0.0) * scale)), residual)


def _min_norm_point(factor: Vector, scaled: Vector) -> Vector:
    """Solve the homogenised NNLS. On a few singular problems scipy's solver stops too early. The residual shows this,
    and the solver is called again with the columns in another order. ``scaled``: the Gram matrix with mean diagonal
    1."""
    k = len(scaled)
    best, least = np.full(k, 1.0 / k), np.inf
    for attempt in range(ATTEMPTS):
        order = np.random.default_rng(attempt).permutation(k) if attempt else np.arange(k)
        u = _nnls(np.vstack([factor[:, order], np.ones((1, k))]), np.eye(1, len(factor) + 1, len(factor))[0])
        if not u.sum() > 0:
            continue
        alpha = np.empty(k)
        alpha[order] = u / u.sum()
        residual = _optimality(alpha, scaled)[1]
        if residual < least:
            best, least = alpha, residual
        if residual < OPTIMAL:
            break
    return best


def _nnls(rows: Vector, target: Vector) -> Vector:
    from scipy.optimize import nnls

    try:
        solution: Vector = nnls(rows, target, maxiter=100 * rows.shape[1])[0]
    except RuntimeError:  # too many iterations: treated as no solution
        return np.zeros(rows.shape[1])
    return solution


def _optimality(alpha: Vector, scaled: Vector) -> tuple[float, float]:
    """alpha^T G alpha, and by how much alpha misses the optimality conditions (G alpha)_k >= alpha^T G alpha."""
    g_alpha = scaled @ alpha
    value = float(alpha @ g_alpha)
    return value, max(0.0, value - float(g_alpha.min()))


def _most_even(alpha: Vector, scaled: Vector, factor: Vector) -> Vector:
    """The alpha nearest to uniform with the same d*; the given alpha if rounding makes the new one less optimal.

    argmin_{a >= 0} ||a||^2 subject to X a = d*, 1^T a = 1, as an NNLS whose constraints are heavily weighted rows. Only
    gradients whose product with d* is the smallest can have alpha > 0.
    """
    before = _optimality(alpha, scaled)
    tight = scaled @ alpha <= before[0] + SINGULAR
    k = int(tight.sum())
    rows = np.vstack([HEAVY * factor[:, tight], HEAVY * np.ones(k), np.eye(k)])
    a = _nnls(rows, np.concatenate([HEAVY * (factor @ alpha), [HEAVY], np.zeros(k)]))
    if not a.sum() > 0:
        return alpha
    even = np.zeros_like(alpha)
    even[tight] = a / a.sum()
    after = _optimality(even, scaled)
    return even if after[0] <= before[0] + ROUNDING and after[1] <= before[1] + ROUNDING else alpha


def as_gram(gram: Tensor) -> Vector:
    """The Gram matrix, checked and made symmetric, in float64 on the CPU."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] == 0:
        raise ValueError(f"gram must be a square matrix [K, K] with K >= 1, got shape {tuple(gram.shape)}")
    g: Vector = gram.detach().cpu().to(torch.float64).numpy()
    if not np.isfinite(g).all():
        raise ValueError("gram holds NaN or infinite values: a gradient was not finite")
    if (np.diag(g) < 0).any():
        raise ValueError("gram has a negative diagonal entry: it is not a Gram matrix")
    symmetric: Vector = (g + g.T) / 2
    return symmetric
