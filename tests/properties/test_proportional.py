"""Proportional fairness on hostile Gram matrices, against a solver of another kind."""

import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from inputs import UNIT_MATRICES, unit_rows
from marble_rl import min_norm
from marble_rl.balancing.proportional import proportional_shares

RIDGE = 0.01
NAMES = list(UNIT_MATRICES)


def gram_of(name):
    unit = UNIT_MATRICES[name].double()
    return unit @ unit.T


def ridged(gram, ridge=RIDGE):
    return (1 - ridge) * gram + ridge * torch.eye(len(gram), dtype=gram.dtype)


def error(gram, shares, priorities=None, ridge=RIDGE):
    """By how much shares miss (U_e a)_k = pi_k / a_k."""
    pi = torch.ones(len(gram), dtype=torch.float64) if priorities is None else priorities / priorities.mean()
    return float((shares * (ridged(gram, ridge) @ shares) - pi).abs().max() / pi.max())


@pytest.mark.parametrize("name", NAMES)
def test_solves_the_equation(name):
    gram = gram_of(name)
    solution = proportional_shares(gram, RIDGE)
    assert (solution.shares > 0).all()
    assert float(solution.shares.max()) <= (len(gram) / RIDGE) ** 0.5 * (1 + 1e-9)
    assert error(gram, solution.shares) < 1e-10
    assert solution.residual == pytest.approx(error(gram, solution.shares), abs=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if len(UNIT_MATRICES[name]) <= 7])
def test_is_the_minimum_that_a_general_solver_finds(name):
    u = ridged(gram_of(name)).numpy()

    def objective(logs):
        a = np.exp(logs)
        return a @ u @ a / 2 - logs.sum(), a * (u @ a) - 1

    start = proportional_shares(gram_of(name), RIDGE).shares.log().numpy()
    best = min(
        (minimize(objective, s, jac=True, method="BFGS", options={"gtol": 1e-10}) for s in (start, 0 * start)),
        key=lambda found: found.fun,
    )
    assert objective(start)[0] == pytest.approx(best.fun, abs=1e-9)


@given(st.integers(1, 12), st.integers(0, 10_000), st.floats(1e-4, 1.0), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_any_vectors_any_priorities(k, seed, ridge, common):
    g = torch.Generator().manual_seed(seed)
    rows = unit_rows(torch.randn(k, 5, generator=g, dtype=torch.float64) + 4 * common)
    priorities = torch.rand(k, generator=g, dtype=torch.float64) * 5 + 0.01
    solution = proportional_shares(rows @ rows.T, ridge, priorities)
    assert error(rows @ rows.T, solution.shares, priorities, ridge) < 1e-10


def test_what_it_promises():
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(proportional_shares(eye, RIDGE).shares, torch.ones(4, dtype=torch.float64))
    assert proportional_shares(torch.ones(1, 1), RIDGE).shares.item() == pytest.approx(1.0)
    # Three equal vectors and one orthogonal to them: together they count sqrt(3) times the one.
    rows = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]], dtype=torch.float64)
    shares = proportional_shares(rows @ rows.T, 1e-9).shares
    assert float(shares[:3].sum() / shares[3]) == pytest.approx(3**0.5, rel=1e-6)
    # Only the ratios of priorities count, and a larger one gets more.
    once, twice = (proportional_shares(eye, RIDGE, f * torch.tensor([1.0, 1, 1, 3])).shares for f in (1.0, 2.0))
    torch.testing.assert_close(once, twice)
    torch.testing.assert_close(once, torch.tensor([1.0, 1, 1, 3]).double().div(1.5).sqrt())


@pytest.mark.parametrize("name", NAMES)
def test_opposes_nobody_where_a_common_direction_exists(name):
    gram = gram_of(name)
    if min_norm(gram).norm > 0.2:
        progress = gram @ proportional_shares(gram, 1e-6).shares
        assert float(progress.min()) > 0


def test_the_order_of_the_rewards_does_not_matter():
    gram = gram_of(NAMES[-1])
    order = torch.randperm(len(gram), generator=torch.Generator().manual_seed(0))
    shares = proportional_shares(gram, RIDGE).shares
    torch.testing.assert_close(proportional_shares(gram[order][:, order], RIDGE).shares, shares[order])


@pytest.mark.parametrize(
    ("gram", "ridge", "priorities", "message"),
    [
        (torch.eye(2), 0.0, None, "ridge"),
        (torch.eye(2), 0.1, torch.tensor([1.0, 0.0]), "priorities"),
        (torch.eye(2), 0.1, torch.ones(3), "priorities"),
        (torch.full((2, 2), float("nan")), 0.1, None, "NaN"),
        (torch.ones(2, 3), 0.1, None, "square"),
    ],
)
def test_bad_input(gram, ridge, priorities, message):
    with pytest.raises(ValueError, match=message):
        proportional_shares(gram, ridge, priorities)


@pytest.mark.full
@pytest.mark.parametrize("k", [5, 16, 64])
def test_takes_at_most_twice_the_time_of_min_norm(k):
    """Interleaved in one process, on gradients with much in common and noise of their own."""
    g = torch.Generator().manual_seed(k)
    grams = []
    for _ in range(20):
        rows = unit_rows(torch.randn(k, 400, generator=g).double() + torch.randn(1, 400, generator=g).double())
        grams.append(rows @ rows.T)

    def seconds(solve):
        start = time.process_time()
        for gram in grams:
            solve(gram)
        return time.process_time() - start

    seconds(min_norm)
    ratios = [seconds(lambda gram: proportional_shares(gram, RIDGE)) / seconds(min_norm) for _ in range(9)]
    assert statistics.median(ratios) < 2, ratios
