"""Bradley-Terry strengths: closed forms, an independent optimizer, and answers that have no finite maximum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from marble_rl.rating.bradley_terry import strengths
from marble_rl.rating.crossed import UNKNOWN


def cells(total: list[list[float]]) -> np.ndarray:
    """One rater, one prompt."""
    return np.array(total, dtype=float)[None, None]


def values(total: list[list[float]]) -> list[float | None]:
    names = [chr(ord("a") + i) for i in range(len(total))]
    return [each.value for each in strengths(cells(total), names).values]


def test_two_models_have_the_log_odds() -> None:
    """30 to 10 with ties half: beta_a - beta_b = log 3."""
    assert values([[0, 30], [10, 0]]) == pytest.approx([math.log(3) / 2, -math.log(3) / 2])
    assert values([[0, 5], [5, 0]]) == pytest.approx([0, 0])


def test_the_likelihood_has_its_maximum_there() -> None:
    total = [[0, 17.5, 3, 40], [2.5, 0, 9, 1], [1, 6, 0, 8.5], [0.5, 4, 1.5, 0]]

    def loss(beta: np.ndarray) -> float:
        return sum(
            total[a][b] * math.log(1 + math.exp(beta[b] - beta[a])) for a in range(4) for b in range(4) if a != b
        )

    best = minimize(loss, np.zeros(4), options={"gtol": 1e-9}).x
    assert values(total) == pytest.approx(best - best.mean(), abs=1e-5)


def test_nearly_separated_models_converge() -> None:
    found = values([[0, 9999.5], [0.5, 0]])
    assert found[0] == pytest.approx(math.log(9999.5 / 0.5) / 2)


@pytest.mark.parametrize(
    ("total", "said"),
    [
        ([[0, 3], [0, 0]], "a won every comparison with the others"),
        ([[0, 0, 0], [2, 0, 1], [4, 2, 0]], "b, c won every comparison with the others"),
        ([[0, 2, 0], [1, 0, 0], [0, 0, 0]], "a, b was never compared with the others"),
        ([[0, 0], [0, 0]], "a was never compared with the others"),
    ],
)
def test_separated_models_have_no_strength_and_the_reason_is_given(total: list[list[float]], said: str) -> None:
    found = strengths(cells(total), ["a", "b", "c"][: len(total)])
    assert found.values == [UNKNOWN] * len(total)
    assert said in found.reason


def test_the_interval_is_that_of_the_log_odds() -> None:
    """One rater and n prompts with one comparison each: by the delta method the standard error of
    beta_a - beta_b = logit p is 1 / sqrt(n p (1 - p)), up to n / (n - 1)."""
    n, won = 40, 28
    wins = np.zeros((1, n, 2, 2))
    wins[0, :won, 0, 1] = wins[0, won:, 1, 0] = 1
    first = strengths(wins, ["a", "b"]).values[0]
    p = won / n
    error = math.sqrt(n / (n - 1)) / math.sqrt(n * p * (1 - p)) / 2  # of beta_a alone, half of the difference
    assert first.value == pytest.approx(math.log(p / (1 - p)) / 2)
    assert first.high is not None
    assert first.high - first.value == pytest.approx(2.0227 * error, rel=1e-4)  # t(0.975, 39)
