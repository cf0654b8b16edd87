"""The common direction of one batch, from the Gram matrix of its gradients alone (docs/method.md, section 3).

    ghat_k  = g_k / ||g_k||                                                (3) normalise
    alpha*  = argmin_{simplex} || sum_k alpha_k ghat_k ||^2                (4) harmonise
    d_final = (sum_k alpha*_k ghat_k) * mean_k ||g_k||                     (5) rescale

Our choices, which the paper leaves open:

- A reward without a gradient in the batch is left out of the QP; otherwise the min-norm point would be 0.
- If the min-norm point is shorter than 1e-6, the batch is Pareto-stationary: all weights are 0, no reward is updated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.balancing.min_norm import MinNorm, as_gram, min_norm

STATIONARY_NORM = 1e-6
"""A min-norm point shorter than this counts as zero. The unit of length is that of `Direction.norm`."""


@dataclass(frozen=True)
class Direction:
    """The update computed from one Gram matrix, without state."""

    alpha: Tensor
    """[K] float64: solution of the QP (or 1/K each, with `equal_shares`); 0 for rewards left out of it."""
    weights: Tensor
    """[K] float64: the reward update is sum_k weights_k g_k."""
    active: Tensor
    """[K] bool: the reward has a gradient in this batch."""
    stationary: bool
    """The gradients cancel (``norm`` is below STATIONARY_NORM): no direction is good for all rewards."""
    norm: float
    """Length of sum_k alpha_k ghat_k, where unit gradients have length 1. In `raw_direction`: length of sum_k alpha_k
    g_k over the mean of the ||g_k||."""
    kkt_residual: float


def common_direction(gram: Tensor, solve: Callable[[Tensor], MinNorm] = min_norm) -> Direction:
    """Steps 3 to 5 for the *raw* Gram matrix [K, K] of the g_k. ``solve`` gets the Gram matrix of the unit
    gradients."""
    # Dividing by the norms one after the other cannot underflow where their product would.
    return _solved(gram, lambda g, n: solve(g / n[:, None] / n[None, :]), rescaled)


def raw_direction(gram: Tensor) -> Direction:
    """Step 4 on the gradients as they are: the paper's ablation without normalisation."""
    return _solved(gram, lambda g, n: min_norm(g / n.mean() ** 2), lambda alpha, norms: alpha.clone())


def _solved(
    gram: Tensor, solve: Callable[[Tensor, Tensor], MinNorm], weigh: Callable[[Tensor, Tensor], Tensor]
) -> Direction:
    """``solve`` gets the Gram matrix and norms of the rewards that have a gradient. ``weigh`` turns its alpha and the
    norms into weights of the raw gradients."""
    g = torch.as_tensor(as_gram(gram))
    norms = g.diagonal().sqrt()
    active = norms > 0
    alpha = torch.zeros_like(norms)
    if not active.any():
        return Direction(alpha, alpha.clone(), active, stationary=False, norm=0.0, kkt_residual=0.0)
    solution = solve(g[active][:, active], norms[active])
    alpha[active] = solution.alpha
    stationary = solution.norm < STATIONARY_NORM
    weights = torch.zeros_like(norms) if stationary else weigh(alpha, norms)
    return Direction(alpha, weights, active, stationary, solution.norm, solution.kkt_residual)


def rescaled(alpha: Tensor, norms: Tensor) -> Tensor:
    """Step 5: the weights w [K] with sum_k w_k g_k = (sum_k alpha_k ghat_k) * mean(norms); 0 for a reward without a
    gradient."""
    active = norms > 0
    weights = torch.zeros_like(norms)
    weights[active] = alpha[active] * (norms[active].mean() / norms[active])
    return weights
