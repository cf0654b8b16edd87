"""Intervals of figures over batches: by hand, and by how often they hold the truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marble_rl.diagnose.analysis import direction_figures
from marble_rl.diagnose.intervals import COSINE, RATE, SHARE, Bounds, jackknife, mean_over_batches
from marble_rl.diagnose.record import DirectionFigures
from marble_rl.intervals import Interval, student_interval

K, M, P = 2, 10, 4
ANYTHING = Bounds(-math.inf, math.inf)


def numbers(count: int) -> Tensor:
    return torch.arange(count)


def test_independent_values_cover() -> None:
    dice = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        found = mean_over_batches((0.3 + torch.randn(50, generator=dice)).tolist(), ANYTHING)
        covered += found.low <= 0.3 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_of_a_mean_the_jackknife_is_students_interval() -> None:
    values = torch.randn(7, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (found,) = jackknife(lambda kept: values[kept].mean(0), numbers(7), [ANYTHING])
    student = student_interval(values[:, 0].tolist())
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((student.mean, student.low, student.high))


def test_an_interval_ends_where_its_figure_does() -> None:
    assert mean_over_batches([0.4, 0.9, 0.9], SHARE).high == 1.0
    assert mean_over_batches([-0.9, 0.9], COSINE) == Interval(0.0, -1.0, 1.0)
    beyond = mean_over_batches([1.0 + 1e-12, 1.0 + 1e-12], COSINE)
    assert beyond.low <= beyond.mean <= beyond.high, "rounding"


def test_a_rate_is_so_many_answers() -> None:
    """Clopper and Pearson's: none in n is 0 to 1 - 0.025^(1/n), which no spread of n zeros tells."""
    assert mean_over_batches([0.0] * 50, RATE) == Interval(0.0, 0.0, pytest.approx(1 - 0.025 ** (1 / 50)))
    assert mean_over_batches([1.0] * 3, RATE) == Interval(1.0, pytest.approx(0.025 ** (1 / 3)), 1.0)
    four = mean_over_batches([1.0] * 4 + [0.0] * 46, RATE)
    assert (four.mean, four.low, four.high) == (0.08, pytest.approx(0.0222, abs=1e-4), pytest.approx(0.1923, abs=1e-4))


def test_with_few_batches_the_interval_is_all_that_is_possible() -> None:
    assert mean_over_batches([], COSINE) is None
    assert mean_over_batches([0.3], COSINE) == Interval(0.3, -1.0, 1.0)
    values = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)

    def mean(kept: Tensor) -> Tensor:
        return values[kept].mean(0)

    (two,) = jackknife(mean, numbers(2), [COSINE])
    assert (two.low, two.high) == (-1.0, 1.0)
    (three,) = jackknife(mean, numbers(3), [COSINE])
    assert -1 < three.low < three.mean < three.high < 1
    (needs_all,) = jackknife(lambda kept: mean(kept) if len(kept) == 3 else mean(kept) * torch.nan, numbers(3), [RATE])
    assert needs_all == Interval(pytest.approx(0.2), 0.0, 1.0)
    (nothing,) = jackknife(lambda kept: torch.full((1,), torch.nan), numbers(3), [COSINE])
    assert nothing is None


@pytest.mark.parametrize(("rate", "batches", "low", "high"), [(0.0, 3, 0.0, 0.7076), (1.0, 50, 0.9289, 1.0)])
def test_a_rate_that_never_changes_is_not_certain(rate: float, batches: int, low: float, high: float) -> None:
    """The exact binomial interval: (0.025)^(1/n) away from the rate."""
    (found,) = jackknife(lambda kept: torch.full((1,), rate, dtype=torch.float64), numbers(batches), [RATE])
    assert (found.mean, found.low, found.high) == pytest.approx((rate, low, high), abs=1e-4)


def drawn(dice: torch.Generator) -> Tensor:
    """[M, K + 1, M, K + 1] products of gradients mu_k + noise, with their sum as probe."""
    mu = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.3, 0.8, 0.0, 0.0]], dtype=torch.float64)
    g = mu + torch.randn(M, K, P, dtype=torch.float64, generator=dice)
    g = torch.cat([g, g.sum(1, keepdim=True)], dim=1)
    return torch.einsum("mjp,nip->mjni", g, g)


def independent(figures: DirectionFigures) -> Interval:
    return figures.independent["mean_cos"]


def rest(figures: DirectionFigures) -> Interval:
    return figures.rest["mean_cos"]


@pytest.fixture(scope="module")
def repeated() -> list[DirectionFigures]:
    """Of the mean of the gradients, in 300 experiments."""
    dice = torch.Generator().manual_seed(1)
    weights = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).expand(M, K + 1)
    return [direction_figures(drawn(dice), weights, K) for _ in range(300)]


@pytest.mark.full
@pytest.mark.parametrize("figure", [independent, rest])
def test_figures_of_pairs_cover(
    repeated: list[DirectionFigures], figure: Callable[[DirectionFigures], Interval]
) -> None:
    """The mean of all experiments is next to the truth."""
    found = [figure(one) for one in repeated]
    truth = sum(one.mean for one in found) / len(found)
    covered = sum(one.low <= truth <= one.high for one in found) / len(found)
    assert 0.88 <= covered <= 1.0


def test_the_spread_of_the_makers_alone_does_not_cover() -> None:
    """Why the jackknife is there: all makers share the batches that they are measured with."""
    dice = torch.Generator().manual_seed(1)
    intervals = []
    for _ in range(300):
        found = drawn(dice)
        along = (found[:, :K, :, 0] + found[:, :K, :, 1]) / 2  # [n, K, m]
        lengths = torch.einsum("mkmk->mk", found[:, :K, :, :K]).sqrt()
        own = torch.einsum("mjmi->mji", found[:, :K, :, :K]).mean((1, 2)).sqrt()
        cosines = (along / lengths[:, :, None] / own).mean(1).fill_diagonal_(torch.nan)
        intervals.append(student_interval(cosines.nanmean(0).tolist()))
    truth = sum(interval.mean for interval in intervals) / len(intervals)
    assert sum(interval.low <= truth <= interval.high for interval in intervals) / len(intervals) < 0.85
