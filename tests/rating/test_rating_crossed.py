"""Intervals over raters and prompts: textbook formulas, and how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t

from marble_rl.intervals import student_interval
from marble_rl.rating.crossed import UNKNOWN, Estimate, crossed_mean

DICE = np.random.default_rng(3)


def estimate(y: np.ndarray) -> Estimate:
    """Of answers [R, P], one in each cell; NaN: none."""
    there = np.isfinite(y)
    return crossed_mean(np.where(there, y, 0), there.astype(float), -np.inf, np.inf)


def test_complete_answers_give_the_two_way_analysis_of_variance() -> None:
    """Mean squares of raters, prompts and rest: SE^2 = (MS_R + MS_P - MS_E) / (R P)."""
    raters, prompts = 4, 7
    y = DICE.normal(size=(raters, 1)) + DICE.normal(size=(1, prompts)) + DICE.normal(size=(raters, prompts))
    grand = y.mean()
    ms_r = prompts * ((y.mean(1) - grand) ** 2).sum() / (raters - 1)
    ms_p = raters * ((y.mean(0) - grand) ** 2).sum() / (prompts - 1)
    rest = y - y.mean(1)[:, None] - y.mean(0)[None, :] + grand
    ms_e = (rest**2).sum() / ((raters - 1) * (prompts - 1))
    total = ms_r + ms_p - ms_e
    freedom = total**2 / (ms_r**2 / 3 + ms_p**2 / 6 + ms_e**2 / 18)
    reach = t.ppf(0.975, freedom) * np.sqrt(total / (raters * prompts))
    found = estimate(y)
    assert (found.value, found.low, found.high) == pytest.approx((grand, grand - reach, grand + reach))


@pytest.mark.parametrize("shape", [(1, 9), (9, 1)], ids=["one rater", "one prompt"])
def test_with_one_of_them_it_is_students_interval_over_the_other(shape: tuple[int, int]) -> None:
    y = DICE.normal(size=shape)
    expected = student_interval(y.ravel())
    found = estimate(y)
    assert (found.value, found.low, found.high) == pytest.approx((expected.mean, expected.low, expected.high))


def test_who_has_not_answered_does_not_count() -> None:
    y = DICE.normal(size=(4, 7))
    y[2] = y[:, 3] = np.nan
    assert estimate(y) == estimate(np.delete(np.delete(y, 2, 0), 3, 1))


def test_nothing_is_certain_because_nobody_differs() -> None:
    assert estimate(np.full((3, 5), 4.0)) == Estimate(value=4.0)
    assert estimate(np.array([[2.0]])) == Estimate(value=2.0)
    assert estimate(np.full((2, 3), np.nan)) == UNKNOWN


def test_an_interval_ends_where_answers_end() -> None:
    found = crossed_mean(np.array([[5.0, 5.0, 1.0], [5.0, 5.0, 5.0]]), np.ones((2, 3)), 1, 5)
    assert found.high == 5
    assert found.low is not None
    assert found.low >= 1


@pytest.mark.parametrize("spread", [(0.5, 0.5, 1.0), (1.0, 0.3, 0.5), (0.1, 0.5, 1.0)], ids=str)
@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_it_holds_the_truth_as_often_as_it_says(spread: tuple[float, float, float], missing: float) -> None:
    by_rater, by_prompt, rest = spread
    dice = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        y = by_rater * dice.normal(size=(5, 1)) + by_prompt * dice.normal(size=(1, 30))
        y = y + rest * dice.normal(size=(5, 30))
        y[dice.random(y.shape) < missing] = np.nan
        found = estimate(y)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
    assert 0.92 <= covered / 400 <= 0.99
