"""How sure a figure over mini-batches is.

A figure that has one value in each batch is a mean of independent values: Student's t. If these are yes or no, their
mean is a rate, and its interval the exact one of as many answers (Clopper and Pearson): 0 of 50 is 0 to 0.07.

Most figures measure the direction of one batch with the gradients of the others. All directions share those gradients,
so that their values are not independent, and their spread hides most of what other batches would change. Leaving out
each batch b in turn, as the maker of a direction *and* as one that others are measured with, shows it (the jackknife):
with theta_(-b) the figure of the batches that are left,

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

from marble_rl.intervals import LEVEL, student_mean, student_reach

FEWEST = 3
"""Batches that a jackknife needs: with one of them left out there must still be a pair."""
ENOUGH = 20
"""Batches; with fewer, figures without an interval (signal, cosines between rewards) may be anything."""
UNCHANGED = 1e-20
"""A squared error below it is rounding; figures are of the order of 1."""


def few(batches: int) -> str:
    """What to say of a diagnosis that rests on few; nothing where they are enough."""
    if batches >= ENOUGH:
        return ""
    return (
        f"{batches} batches are few: intervals are wide, and signal and cosines between rewards, which have none, may "
        "be anything. Give --batches 50."
    )


@dataclass(frozen=True)
class Range:
    """What a figure can be; its interval does not go beyond."""

    low: float
    high: float
    is_rate: bool = False
    """How often something is so"""


COSINE = Range(-1.0, 1.0)
SHARE = Range(0.0, 1.0)
RATE = Range(0.0, 1.0, is_rate=True)


@dataclass(frozen=True)
class Estimate:
    """A mean over batches with its 95 % interval; all of them NaN where there is nothing to tell."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], within: Range) -> Estimate:
        """Of independent values, one a batch. A single one tells nothing of the others: the whole range."""
        if not values:
            return UNKNOWN
        if within.is_rate:
            rate = sum(values) / len(values)
            return cls(rate, *_of_answers(rate, len(values)))
        return cls.inside(*student_mean(values), within) if len(values) > 1 else cls(values[0], within.low, within.high)

    @classmethod
    def inside(cls, mean: float, low: float, high: float, within: Range) -> Estimate:
        """Rounding may have put the mean itself a little beyond the range."""
        return cls(mean, max(low, min(mean, within.low)), min(high, max(mean, within.high)))


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def jackknife(figures: Callable[[Tensor], Tensor], batches: Tensor, within: Sequence[Range]) -> list[Estimate]:
    """[F] estimates of ``figures``, a function of the numbers of some batches -> [F] float64 (NaN: cannot be told).

    ``batches``: the numbers of those that take part; the degrees of freedom are one less. Where they are too few, or
    all depends on a single one of them, the interval is the whole range.
    """
    means = figures(batches).tolist()
    errors = [math.nan] * len(means)
    if len(batches) >= FEWEST:
        without = torch.stack([figures(batches[batches != left_out]) for left_out in batches])  # [M, F]
        errors = ((len(batches) - 1) * without.var(0, unbiased=False)).tolist()
    return [_estimate(*one, len(batches)) for one in zip(means, errors, within, strict=True)]


def _estimate(mean: float, squared_error: float, within: Range, batches: int) -> Estimate:
    if math.isnan(mean):
        return UNKNOWN
    if math.isnan(squared_error):
        return Estimate(mean, within.low, within.high)
    if within.is_rate and squared_error < UNCHANGED:
        return Estimate.inside(mean, *_of_answers(mean, batches), within)
    reach = student_reach(squared_error, batches - 1)
    return Estimate.inside(mean, mean - reach, mean + reach, within)


def _of_answers(rate: float, answers: int) -> tuple[float, float]:
    """Both ends of the exact interval of a rate, from independent answers."""
    from scipy.special import betaincinv  # as in student.py

    yes, tail = rate * answers, (1 - LEVEL) / 2
    low = betaincinv(yes, answers - yes + 1, tail) if yes > 0 else 0.0
    high = betaincinv(yes + 1, answers - yes, 1 - tail) if yes < answers else 1.0
    return float(low), float(high)
