"""How sure a figure over mini-batches is.

A figure that has one value in each batch is a mean of independent values: Student's t. If these are yes or no, their
mean is a rate, and its interval the exact one of as many answers (Clopper and Pearson): 0 of 50 is 0 to 0.07.

Most figures measure the direction of one batch with the gradients of the others. All directions share those gradients,
so that their values are not independent, and their spread hides most of what other batches would change. Leaving out
each batch b in turn, both as the source of a direction and as one that others are measured with, shows it (the
jackknife): with theta_(-b) the figure of the batches that are left,

    SE^2 = (M - 1) / M  sum_b (theta_(-b) - mean_b theta_(-b))^2 ,        theta +- t(0.975, M - 1) SE .

For a mean of independent values this is Student's t again. The rate of a conflict may stay the same whichever batch is
left out, above all with few of them or near 0 and 1. That is not certainty: it then gets the exact interval, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.intervals import LEVEL, Interval, student_interval, student_reach

FEWEST = 3
"""Batches that a jackknife needs: with one of them left out there must still be a pair."""
ENOUGH = 20
"""Batches; with fewer, figures without an interval (signal by batch size, cosines between rewards) are rough."""
UNCHANGED = 1e-20
"""A squared error below it is rounding; figures are of the order of 1."""


def few(batches: int) -> str:
    """A warning for a diagnosis that rests on few batches; empty where they are enough."""
    if batches >= ENOUGH:
        return ""
    return (
        f"{batches} batches are few: intervals are wide, and the figures without one (signal at other batch sizes, "
        "cosines between rewards) are rough. Give --batches 50."
    )


@dataclass(frozen=True)
class Bounds:
    """Values that a figure can have; its interval is cut there."""

    low: float
    high: float
    is_rate: bool = False
    """Whether the figure is a share of yes among yes-or-no answers"""

    @property
    def everything(self) -> tuple[float, float]:
        return self.low, self.high

    def cut(self, interval: Interval) -> Interval:
        """Rounding may have put the mean itself a little out of bounds."""
        mean = interval.mean
        low, high = max(interval.low, min(mean, self.low)), min(interval.high, max(mean, self.high))
        return Interval(mean, low, high)


COSINE = Bounds(-1.0, 1.0)
DIFFERENCE = Bounds(-2.0, 2.0)
"""Of two cosines"""
SHARE = Bounds(0.0, 1.0)
RATE = Bounds(0.0, 1.0, is_rate=True)


def mean_over_batches(values: Sequence[float], bounds: Bounds) -> Interval | None:
    """Of independent values, one a batch; None without any. A single one says nothing of others: its interval is all
    that is possible."""
    if not values:
        return None
    if bounds.is_rate:
        rate = sum(values) / len(values)
        return Interval(rate, *_exact_ends(rate, len(values)))
    return bounds.cut(student_interval(values)) if len(values) > 1 else Interval(values[0], *bounds.everything)


def jackknife(
    figures: Callable[[Tensor], Tensor], batches: Tensor, bounds: Sequence[Bounds], level: float = LEVEL
) -> list[Interval | None]:
    """[F] intervals of ``figures``, a function of the indices of some batches -> [F] float64 (NaN: unknown).

    ``batches``: the indices of those that take part; the degrees of freedom are one less. Where they are too few, or
    all depends on a single one of them, the interval is all that is possible.
    """
    means = figures(batches).tolist()
    errors = [math.nan] * len(means)
    if len(batches) >= FEWEST:
        without = torch.stack([figures(batches[batches != left_out]) for left_out in batches])  # [M, F]
        errors = ((len(batches) - 1) * without.var(0, unbiased=False)).tolist()
    return [_interval(*one, len(batches), level) for one in zip(means, errors, bounds, strict=True)]


def _interval(mean: float, squared_error: float, bounds: Bounds, batches: int, level: float) -> Interval | None:
    if math.isnan(mean):
        return None
    if math.isnan(squared_error):
        return Interval(mean, *bounds.everything)
    if bounds.is_rate and squared_error < UNCHANGED:
        return bounds.cut(Interval(mean, *_exact_ends(mean, batches)))
    reach = student_reach(squared_error, batches - 1, level)
    return bounds.cut(Interval(mean, mean - reach, mean + reach))


def _exact_ends(rate: float, answers: int) -> tuple[float, float]:
    """Of Clopper and Pearson's interval of a rate, from independent answers. Not scipy's `binomtest`: a rate over pairs
    of batches need not be a whole number of answers."""
    from scipy.stats import beta  # slow to import

    yes, tail = rate * answers, (1 - LEVEL) / 2
    low = beta.ppf(tail, yes, answers - yes + 1) if yes > 0 else 0.0
    high = beta.ppf(1 - tail, yes + 1, answers - yes) if yes < answers else 1.0
    return float(low), float(high)
