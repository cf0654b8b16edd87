"""The guards' quadratic program on hostile inputs: optimality, and the same answer as a general solver's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from marble_rl.balancing.guards import LARGEST, MATERIAL, STIFFNESS, bounded_multipliers, pull_of_guards


def unit_gram(vectors: np.ndarray) -> np.ndarray:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


def rows(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=float)


RANDOM = np.random.default_rng(0)
GRAMS = {
    "one guard": unit_gram(rows([1.0, 2.0])),
    "orthogonal": np.eye(4),
    "duplicates": unit_gram(rows([1, 0], [1, 0], [1, 0])),
    "opposites": unit_gram(rows([1, 0], [-1, 0])),
    "nearly opposites": unit_gram(rows([1, 1e-7], [-1, 1e-7])),
    "three that cancel": unit_gram(rows([1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)])),
    "more guards than dimensions": unit_gram(RANDOM.normal(size=(12, 3))),
    "many": unit_gram(RANDOM.normal(size=(40, 300))),
}


@pytest.mark.parametrize("name", GRAMS)
@pytest.mark.parametrize("scale", [1e-12, 1.0])
def test_optimality(name: str, scale: float) -> None:
    unit = GRAMS[name]
    for seed in range(20):
        wanted = scale * np.random.default_rng(seed).uniform(-2.0, 1.5, len(unit))
        solution, residual = bounded_multipliers(unit, wanted)
        assert residual <= 1e-10
        assert (solution >= 0).all()
        assert (solution <= LARGEST).all()
        if (wanted <= 0).all():
            assert not solution.any()


@pytest.mark.parametrize("name", [name for name in GRAMS if name != "many"])
def test_the_dual_is_what_a_general_solver_finds(name: str) -> None:
    unit = GRAMS[name]
    matrix = unit + np.eye(len(unit)) / (2 * STIFFNESS)
    for seed in range(5):
        wanted = np.random.default_rng(seed).uniform(-1.0, 1.5, len(unit))
        found = minimize(
            lambda x, b=wanted: x @ matrix @ x / 2 - b @ x,
            np.full(len(unit), 0.5),
            jac=lambda x, b=wanted: matrix @ x - b,
            bounds=[(0.0, LARGEST)] * len(unit),
            method="L-BFGS-B",
            options={"ftol": 1e-16, "gtol": 1e-12, "maxiter": 20_000, "maxfun": 100_000},
        )
        solution, _ = bounded_multipliers(unit, wanted)
        value = solution @ matrix @ solution / 2 - wanted @ solution
        assert value <= found.fun + 1e-9
        np.testing.assert_allclose(solution, found.x, atol=1e-4)


def huber(s: np.ndarray) -> np.ndarray:
    """The price of slack."""
    edge = LARGEST / (2 * STIFFNESS)
    return np.where(s <= edge, STIFFNESS * s**2, STIFFNESS * edge**2 + LARGEST * (s - edge))


@pytest.mark.parametrize("seed", range(6))
def test_the_correction_is_the_smallest_one(seed: int) -> None:
    """The primal problem, in the space of the vectors: correction v and slack s."""
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(3, 4))
    if seed % 2:
        vectors[1] = -vectors[0] + 0.3 * random.normal(size=4)
    objectives = random.normal(size=4)
    rates = {0: 0.5, 1: 0.3, 2: -0.2}
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    length = float(np.linalg.norm(objectives))
    every = np.vstack([vectors, objectives])
    direction = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    pull = pull_of_guards(torch.as_tensor(every @ every.T), direction, length, rates)

    def price(x: np.ndarray) -> float:
        return float(x[:4] @ x[:4] / 2 + huber(x[4:]).sum())

    wanted = np.array(list(rates.values()))
    found = minimize(
        price,
        np.concatenate([np.zeros(4), np.full(3, 2.0)]),
        constraints=[{"type": "ineq", "fun": lambda x: unit @ (objectives / length + x[:4]) - wanted + x[4:]}],
        bounds=[(None, None)] * 4 + [(0.0, None)] * 3,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 2000},
    )
    multipliers, slack = pull.multipliers[:3].numpy(), pull.slack[:3].numpy()
    ours = np.concatenate([multipliers @ unit, slack])
    assert price(ours) == pytest.approx(found.fun, abs=1e-6)
    np.testing.assert_allclose(ours[:4], found.x[:4], atol=1e-3)
    assert (unit @ (objectives / length + ours[:4]) + slack >= wanted - 1e-9).all()


def test_a_guard_alone_gets_its_rate() -> None:
    products = torch.tensor([[4.0, -6.0], [-6.0, 9.0]], dtype=torch.float64)  # the objective opposes the guard exactly
    direction = torch.tensor([0.0, 1 / 3], dtype=torch.float64)
    pull = pull_of_guards(products, direction, 1.0, {0: 0.5})
    assert float(pull.multipliers[0]) == pytest.approx(1.5 / (1 + 1 / (2 * STIFFNESS)))
    assert float(pull.slack[0]) < MATERIAL
    assert pull_of_guards(products, direction, 1.0, {0: -1.0}).multipliers.tolist() == [0.0, 0.0]


def test_contradicting_guards_leave_slack_and_bounded_multipliers() -> None:
    products = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    pull = pull_of_guards(products, torch.zeros(2, dtype=torch.float64), 1.0, {0: 0.5, 1: 0.5})
    assert pull.multipliers.tolist() == pytest.approx([LARGEST, LARGEST])
    assert pull.slack.tolist() == pytest.approx([0.5, 0.5])


def test_a_guard_without_a_momentum_is_left_out() -> None:
    products = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    pull = pull_of_guards(products, torch.zeros(2, dtype=torch.float64), 1.0, {0: 0.5})
    assert pull.multipliers.tolist() == [0.0, 0.0]
