"""Hostile gradient matrices [K, P]. A property that is to hold for every balancing rule is tested on all of them."""

import torch
from torch import Tensor


def _normal(k: int, p: int, seed: int) -> Tensor:
    return torch.randn(k, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _low_rank(k: int, p: int, rank: int, seed: int) -> Tensor:
    return _normal(k, rank, seed) @ _normal(rank, p, seed + 1)


def _with_rows(g: Tensor, rows: dict[int, float]) -> Tensor:
    """Multiply the given rows."""
    g = g.clone()
    for row, factor in rows.items():
        g[row] *= factor
    return g


def _ring(k: int) -> Tensor:
    """Evenly spaced around a circle: their hull holds the origin."""
    angle = torch.arange(k, dtype=torch.float64) * (2 * torch.pi / k)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


_AXIS = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
_POSITIVE = _normal(64, 40, 20).abs()
_SCALES = torch.logspace(-10, 15, 6, dtype=torch.float64)[:, None]

MATRICES: dict[str, Tensor] = {
    "one reward": _normal(1, 5, 0),
    "one reward, tiny": 1e-10 * _normal(1, 5, 0),
    "one reward, huge": 1e15 * _normal(1, 5, 0),
    "one reward, zero": torch.zeros(1, 5, dtype=torch.float64),
    "two rewards": _normal(2, 7, 1),
    "five rewards": _normal(5, 50, 2),
    "one parameter": torch.tensor([[1.0], [2.0], [0.5]], dtype=torch.float64),
    "orthogonal": torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)),
    "zero row": _with_rows(_normal(4, 20, 3), {2: 0.0}),
    "all but one row zero": _with_rows(_normal(4, 20, 4), {0: 0.0, 1: 0.0, 3: 0.0}),
    "all rows zero": torch.zeros(4, 20, dtype=torch.float64),
    "duplicates": _normal(3, 20, 5)[[0, 1, 0, 2, 1, 0]],
    "all the same": _normal(1, 20, 6).expand(5, 20).clone(),
    "rank one": torch.tensor([[1.0], [3.0], [0.2], [7.0]], dtype=torch.float64) @ _normal(1, 20, 7),
    "rank one, mixed signs": torch.tensor([[1.0], [-3.0], [0.2]], dtype=torch.float64) @ _normal(1, 20, 7),
    "opposed pair": torch.stack([_AXIS, -_AXIS]),
    "opposed pair, unequal": torch.stack([2.0 * _AXIS, -1e-3 * _AXIS]),
    "opposed pair and a third": torch.cat([torch.stack([_AXIS, -_AXIS]), _normal(1, 4, 8)]),
    "nearly opposed": torch.stack([_AXIS, -_AXIS]) + 1e-3 * _normal(1, 4, 9),
    "nearly opposed, 1e-5": torch.stack([_AXIS, -_AXIS]) + 1e-5 * _normal(1, 4, 9),
    "nearly parallel": _normal(1, 30, 10) + 1e-6 * _normal(5, 30, 11),
    "nearly parallel, 1e-9": _normal(1, 30, 10) + 1e-9 * _normal(5, 30, 12),
    "ring": _ring(7),
    "one dominated": torch.tensor([[1.0, 0.3], [-1.0, 0.3], [0.0, 1.0]], dtype=torch.float64),
    "tiny": 1e-10 * _normal(4, 20, 13),
    "huge": 1e15 * _normal(4, 20, 14),
    "scales 1e-10 to 1e15": _SCALES * _normal(6, 50, 15),
    "scales 1e-10 to 1e15, conflicting": _SCALES * (_normal(6, 8, 16) + 0.3),
    "low rank": _low_rank(6, 40, 2, 17),
    "low rank, 3": _low_rank(6, 40, 3, 27),
    "low rank in a half space": torch.cat([_low_rank(6, 40, 2, 28), torch.ones(6, 1, dtype=torch.float64)], dim=1),
    "64 rewards": _normal(64, 300, 18),
    "64 rewards in 8 dimensions": _normal(64, 8, 19),
    "64 rewards in an orthant": _POSITIVE,
    "64 rewards in an orthant, low rank": _normal(64, 4, 21).abs() @ _normal(4, 40, 22).abs(),
    "64 rewards nearly parallel": _normal(1, 100, 23) + 1e-6 * _normal(64, 100, 24),
    "64 rewards, duplicates and zeros": _with_rows(_POSITIVE[torch.arange(64) // 2], {0: 0.0, 63: 0.0}),
    "64 rewards of one direction": torch.ones(64, 1, dtype=torch.float64) @ _normal(1, 20, 25),
}


def unit_rows(g: Tensor) -> Tensor:
    """The rows that are not zero, at length 1."""
    norms = g.norm(dim=1)
    return g[norms > 0] / norms[norms > 0, None]


UNIT_MATRICES = {name: unit_rows(g) for name, g in MATRICES.items() if g.norm() > 0}

STATIONARY = frozenset(
    {
        "low rank",
        "low rank, 3",
        "opposed pair",
        "opposed pair, unequal",
        "opposed pair and a third",
        "rank one, mixed signs",
        "ring",
        "64 rewards in 8 dimensions",
    }
)
"""The hull of the unit rows holds the origin: no direction is good for every reward."""
