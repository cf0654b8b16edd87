"""Guards: rewards that must not fall below a floor and ask for nothing more (docs/guards.md).

d0 is the objectives' direction and L a length that does not shrink where the objectives cancel. A guard g with the unit
momentum mhat_g may change at the rate rho_g, from -1 (free to fall) over 0 (must not fall) to 1/2 (must recover); the
rate follows its measured level (training/floors.py). The smallest correction v that gives every guard its rate:

    min_{v, s >= 0}  ||v||^2 / 2 + sum_g h(s_g)    subject to    mhat_g . (d0 / L + v) >= rho_g - s_g
    h(s) = C s^2 ,    continued by a line from where its slope is B

s_g is the slack: how much of its rate a guard does not get. The dual problem has one variable per guard:

    lambda = argmin_{0 <= lambda <= B}  lambda^T (U + I / 2C) lambda / 2 - b . lambda ,    b_g = rho_g - mhat_g . d0 / L
    v = sum_g lambda_g mhat_g ,    direction d0 + L v        (U: Gram matrix of the guards' unit momenta)

It is solved exactly, as a bounded least-squares problem with the Cholesky factor of U + I / 2C.

- C = 50: a guard alone gets all but 1 % of what it asks for, and the matrix is never near singular.
- B = 2: a guard alone needs at most 1.5. Guards that contradict each other would get ever larger multipliers; their
  momenta cancel, but the noise of the batch that is trained on does not. Slack above B / 2C = 0.02 is there only where
  a multiplier is at its bound: no direction satisfies all floors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from marble_rl.balancing.min_norm import Vector
from marble_rl.types import Metrics

STIFFNESS = 50.0
"""C"""
LARGEST = 2.0
"""B"""
MATERIAL = 0.05
"""Slack from which on "no direction satisfies all floors"."""


@dataclass(frozen=True)
class Pull:
    """What the guards add to the objectives' direction. J rewards; 0 for all but the guards with a rate."""

    multipliers: Tensor
    """[J] float64: lambda. 1: as long as L"""
    slack: Tensor
    """[J] float64: s, in units of L"""
    residual: float
    """Largest error in the optimality conditions"""

    def figures(self, names: Mapping[int, str]) -> Metrics:
        """The metrics of these rewards, by their place."""
        multipliers = {f"floor/{name}/lambda": float(self.multipliers[j]) for j, name in names.items()}
        return {**multipliers, **{f"floor/{name}/slack": float(self.slack[j]) for j, name in names.items()}}


def pull_of_guards(products: Tensor, direction: Tensor, length: float, rates: Mapping[int, float]) -> Pull:
    """lambda for the Gram matrix of all momenta [J, J].

    ``direction`` [J]: d0 = sum_j direction_j m_j, 0 for guards. ``length``: L > 0. ``rates``: rho by the guard's place;
    a guard without a momentum is left out.
    """
    multipliers, slack = torch.zeros_like(direction), torch.zeros_like(direction)
    norms = products.diagonal().clamp_min(0.0).sqrt()
    places = [j for j in sorted(rates) if norms[j] > 0]
    if not places:
        return Pull(multipliers, slack, 0.0)
    n = norms[places]
    unit = (products[places][:, places] / n[:, None] / n[None, :]).numpy()
    progress = (products[places] @ direction / n / length).numpy()
    wanted = np.array([rates[j] for j in places]) - progress
    solution, residual = bounded_multipliers(unit, wanted)
    multipliers[places] = torch.as_tensor(solution)
    slack[places] = torch.as_tensor(np.maximum(wanted - unit @ solution, 0.0))
    return Pull(multipliers, slack, residual)


def bounded_multipliers(unit: Vector, wanted: Vector) -> tuple[Vector, float]:
    """lambda for U [G, G] and b [G], and its residual max |lambda - clip(lambda - gradient, 0, B)|."""
    if (wanted <= 0).all():  # every guard is content with the objectives' direction
        return np.zeros(len(unit)), 0.0
    from scipy.linalg import solve_triangular
    from scipy.optimize import lsq_linear

    matrix = (unit + unit.T) / 2 + np.eye(len(unit)) / (2 * STIFFNESS)
    factor = np.linalg.cholesky(matrix)
    target = solve_triangular(factor, wanted, lower=True)
    solved = lsq_linear(factor.T, target, (0.0, LARGEST), method="bvls", tol=1e-15, max_iter=100 * len(unit))
    solution: Vector = np.clip(solved.x, 0.0, LARGEST)
    moved = np.clip(solution - (matrix @ solution - wanted), 0.0, LARGEST)
    return solution, float(np.abs(solution - moved).max())
