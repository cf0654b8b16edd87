"""The interval of a mean: by the bootstrap and by Student's t."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from marble_rl.intervals import LEVEL, RESAMPLES, Interval, paired_difference, resampled_mean, student_interval


def normal(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Differences around 0.3; prompts differ more among each other than that, which pairing takes away."""
    covered = 0
    for seed in range(200):
        before = 5 * normal(60, 2 * seed)
        found = paired_difference(before, before + 0.3 + normal(60, 2 * seed + 1))
        covered += found.low <= 0.3 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_constant_difference_has_a_point_as_interval() -> None:
    before = normal(40, 0).round()
    assert paired_difference(before, before + 0.25) == Interval(0.25, 0.25, 0.25)
    assert paired_difference(before, before) == Interval(0.0, 0.0, 0.0)


def test_the_interval_is_about_two_standard_errors_wide() -> None:
    before, after = normal(400, 1), normal(400, 2)
    found = paired_difference(before, after)
    error = float((after - before).std()) / 20
    assert found.mean == pytest.approx(float((after - before).mean()))
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)


def test_the_other_way_round_it_is_the_negative() -> None:
    before, after = normal(30, 1), normal(30, 2)
    there, back = paired_difference(before, after), paired_difference(after, before)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))


def test_intervals_are_seeded() -> None:
    before, after = normal(30, 1).float(), normal(30, 2).float()
    assert paired_difference(before, after) == paired_difference(before, after)
    assert paired_difference(before, after, seed=1) != paired_difference(before, after, seed=2)


@pytest.mark.parametrize("at_once", [1, 1000, 12_345, 1 << 20])
def test_resampling_in_parts_changes_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what all resamples drawn at once give."""
    values = normal(67, 5).numpy()
    rows = np.random.default_rng(3).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[rows].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    monkeypatch.setattr("marble_rl.intervals.AT_ONCE", at_once)
    assert resampled_mean(values, 3) == Interval(values.mean(), low, high)


@pytest.mark.parametrize(
    ("low", "high", "significant"), [(0.1, 0.3, True), (-0.3, -0.1, True), (-0.1, 0.3, False), (0.0, 0.3, False)]
)
def test_a_difference_is_significant_where_zero_lies_outside(low: float, high: float, significant: bool) -> None:
    assert Interval((low + high) / 2, low, high).significant is significant


def test_large_differences_are_significant_and_chance_is_not() -> None:
    noise = normal(60, 3)
    assert paired_difference(noise, noise + 1 + 0.5 * normal(60, 4)).significant
    assert paired_difference(noise, noise - 1 + 0.5 * normal(60, 4)).significant
    assert not paired_difference(noise, noise + normal(60, 4) - normal(60, 4).mean()).significant


@pytest.mark.parametrize(("over", "significant"), [("seeds", True), ("prompts", False), ("nothing", False)])
def test_between_methods_only_seeds_decide(over: str, significant: bool) -> None:
    assert Interval(0.2, 0.1, 0.3, 1, over).significant is significant  # type: ignore[arg-type]


def test_students_interval_is_scipys() -> None:
    values = normal(7, 0).numpy()
    low, high = stats.t.interval(LEVEL, 6, loc=values.mean(), scale=stats.sem(values))
    found = student_interval(values)
    assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high))


@pytest.mark.parametrize(
    ("low", "high", "sign"), [(0.0001, 0.3, 1), (-0.3, -0.0001, -1), (1e-9, 2e-9, 0), (-4e-5, -1e-5, 0), (0.0, 0.0, 0)]
)
def test_what_prints_as_zero_is_no_change(low: float, high: float, sign: int) -> None:
    interval = Interval((low + high) / 2, low, high)
    assert (interval.sign, interval.significant) == (sign, sign != 0)
