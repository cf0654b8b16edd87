"""Proportional fairness (Nash bargaining) between unit vectors, from their Gram matrix alone.

With U the Gram matrix of K unit vectors u_k and priorities pi_k > 0 of mean 1, the direction d = sum_k a_k u_k that
maximises sum_k pi_k log(u_k . d) among those of its length has the shares

    (U a)_k = pi_k / a_k ,        a = argmin_{a > 0}  a^T U a / 2 - sum_k pi_k log a_k

They exist exactly where some direction has a positive product with every u_k. So the problem is solved for

    U_e = (1 - e) U + e I ,       which has one solution for every U, with a_k <= sqrt(K / e)

Orthogonal vectors get equal shares; n equal ones together get sqrt(n) times the share of one; opposed ones cancel.

Newton's method with y_k = (change of a_k) / a_k, which keeps its matrix well conditioned wherever a lies:

    (D U_e D + diag(pi)) y = pi - a * (U_e a) ,      D = diag(a) ,      a <- a (1 + s y)

The objective divided by min(pi) is self-concordant: the damped step s = 1 / (1 + lambda), lambda its Newton
decrement, always descends, and near the solution s = 1 converges quadratically. Far from it s is lengthened to the
minimum along y, which saves iterations where the vectors nearly cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from marble_rl.balancing.min_norm import Vector, as_gram

ACCURATE = 1e-12
"""Residual at which the iteration ends."""
ITERATIONS = 200
"""Upper limit; between 4 and 30 are needed."""
QUADRATIC = 0.25
"""Newton decrement below which full steps converge."""
LINE_STEPS = 3
"""Newton steps that lengthen a damped one."""


@dataclass(frozen=True)
class ProportionalShares:
    """Solution of the fairness problem."""

    shares: Tensor
    """[K] float64: a"""
    residual: float
    """max_k |a_k (U_e a)_k - pi_k| / max pi. Zero at the solution."""


def proportional_shares(unit: Tensor, ridge: float, priorities: Tensor | None = None) -> ProportionalShares:
    """Shares for a Gram matrix [K, K] of unit vectors; computed in float64 on the CPU.

    ``priorities`` [K] > 0, by default equal; only their ratios count.
    """
    u = as_gram(unit)
    if not 0.0 < ridge <= 1.0:
        raise ValueError(f"ridge must be in (0, 1], got {ridge}")
    pi = np.ones(len(u)) if priorities is None else priorities.detach().cpu().to(torch.float64).numpy()
    if pi.shape != (len(u),) or not np.isfinite(pi).all() or (pi <= 0).any():
        raise ValueError(f"priorities must be {len(u)} positive numbers, got {pi}")
    shares, residual = _newton((1 - ridge) * u + ridge * np.eye(len(u)), pi / pi.mean())
    return ProportionalShares(torch.as_tensor(shares), residual)


def _newton(u: Vector, pi: Vector) -> tuple[Vector, float]:
    # The start is the solution along sqrt(pi), where the mean condition a^T U a = sum(pi) holds.
    root = np.sqrt(pi)
    a = root * np.sqrt(pi.sum() / (root @ u @ root))
    least, largest = pi.min(), pi.max()
    for _ in range(ITERATIONS):
        missing = pi - a * (u @ a)
        residual = float(np.abs(missing).max() / largest)
        if residual < ACCURATE:
            break
        hessian = a[:, None] * u * a[None, :]
        hessian.flat[:: len(a) + 1] += pi
        y = np.linalg.solve(hessian, missing)
        decrement = np.sqrt(max(float(y @ missing), 0.0) / least)
        a = a * (1.0 + (y if decrement < QUADRATIC else _step_length(u, pi, a, y, 1.0 / (1.0 + decrement)) * y))
    return a, residual


def _step_length(u: Vector, pi: Vector, a: Vector, y: Vector, start: float) -> float:
    """s near the minimum of the objective along a (1 + s y), by Newton's method in one dimension."""
    change = a * y
    slope, curvature = float(change @ u @ a), float(change @ u @ change)
    s = start
    for _ in range(LINE_STEPS):
        ratio = y / (1.0 + s * y)
        first = slope + s * curvature - float(pi @ ratio)
        second = curvature + float(pi @ ratio**2)
        # A step of at most 0.9 of the way to the boundary a_k = 0.
        s = min(s - first / second, s + 0.9 / max(-float(ratio.min()), 1e-300))
        if s <= start:
            return start
    return s
