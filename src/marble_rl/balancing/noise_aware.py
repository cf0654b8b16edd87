"""Noise-aware harmonisation, an experiment (docs/method.md, section 6).

    w* = argmin  w^T G w    subject to  (M w)_k >= sqrt(M_kk) for every reward with M_kk > 0,   w >= 0

G is the Gram matrix of the unit gradients, M the unbiased estimate of the products of what is not noise in them. The
constraint asks for one unit of progress along every reward's true gradient; the objective is the length of the step,
noise included. With M = G the direction is the min-norm point's. M is indefinite, so there may be no solution.

With a factor G = X^T X and z = X w this is Lawson & Hanson's least distance problem, min ||z|| subject to E z >= f,
which one non-negative least-squares problem solves exactly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Vector = npt.NDArray[np.float64]
RIDGE = 1e-9
"""Keeps the factor of a singular G invertible; gradients have unit length."""
FEASIBLE = 1e-9


def noise_aware(gram: Tensor, cross: Tensor) -> Tensor | None:
    """w* [K] in float64 for G, M [K, K], or None where no w meets the constraints."""
    from scipy.optimize import nnls

    g: Vector = gram.to("cpu", torch.float64).numpy()
    m: Vector = cross.to("cpu", torch.float64).numpy()
    k = len(g)
    signal = np.diag(m) > 0
    if not signal.any():
        return None
    bound = np.concatenate([np.sqrt(np.diag(m)[signal]), np.zeros(k)])
    factor = np.linalg.cholesky(g + RIDGE * np.eye(k)).T
    rows = np.linalg.solve(factor.T, np.vstack([m[signal], np.eye(k)]).T).T
    try:
        u, _ = nnls(np.vstack([rows.T, bound]), np.append(np.zeros(k), 1.0), maxiter=100 * len(rows))
    except RuntimeError:
        return None
    residual = np.append(rows.T @ u, bound @ u - 1.0)
    if -residual[-1] < FEASIBLE:  # the bounds can be combined to a contradiction
        return None
    w = np.linalg.solve(factor, residual[:-1] / -residual[-1])
    if (m[signal] @ w < bound[: signal.sum()] * (1 - 1e-6) - 1e-9).any():
        return None
    return torch.as_tensor(np.maximum(w, 0.0))
