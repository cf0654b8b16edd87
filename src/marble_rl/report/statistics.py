"""Statistics of a report: smooth curves, means with intervals, and whether a curve rose."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from marble_rl.intervals import LEVEL, Interval, student_interval, student_reach
from marble_rl.training.summary import LEAST_REFRESHES

LEAST_STEPS = 15
"""Below this nothing is said about a curve: its beginning and its end have five values each."""
CONSTANT = 1e-12
"""Relative range of values below which they differ by rounding alone."""
MOST_POINTS = 400
"""Of a curve that is drawn; longer ones are averaged down."""


def smooth(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[tuple[float, float]]]:
    """Local linear regression with a Gaussian kernel of a twelfth of the run: no lag, and no bias where a curve ends.
    With its pointwise 95 % interval.

    At each x: the weighted least-squares line through the values, w_i = exp(-(x_i - x)^2 / 2 h^2), read off at x. It is
    a linear map of the values, curve = L y, so its variance is s^2 sum_i L_xi^2, with s^2 = |y - L y|^2 / (n - tr L):
    every rollout has other prompts, so the noise of one step says little about the next.

    L has a row and a column for every value: thin long curves first. Means of equally many steps have equal noise too.
    """
    x, y = np.asarray(steps, float), np.asarray(values, float)
    bandwidth = max((x[-1] - x[0]) / 12, 1.0)
    offsets = x[None] - x[:, None]
    weights = np.exp(-0.5 * (offsets / bandwidth) ** 2)
    s0, s1, s2 = (np.sum(weights * offsets**power, axis=1)[:, None] for power in range(3))
    determinant = s0 * s2 - s1**2
    solvable = determinant > 1e-12 * s0**2
    line = weights * (s2 - s1 * offsets) / np.where(solvable, determinant, 1.0)
    smoother = np.where(solvable, line, weights / s0)  # one value alone has no slope
    curve = smoother @ y
    freedom = len(y) - float(np.trace(smoother))
    if freedom < 1:
        return curve.tolist(), [(value, value) for value in curve.tolist()]
    noise = float(np.sum((y - curve) ** 2)) / freedom
    reach = [student_reach(noise * float(row @ row), freedom) for row in smoother]
    return curve.tolist(), [(value - r, value + r) for value, r in zip(curve.tolist(), reach, strict=True)]


def thinned(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `MOST_POINTS` means over runs of equal length."""
    size = math.ceil(len(steps) / MOST_POINTS) or 1
    parts = [slice(i, i + size) for i in range(0, len(steps), size)]
    return [float(np.mean(steps[part])) for part in parts], [float(np.mean(values[part])) for part in parts]


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Mean of independent values with Student's 95 % interval; None for fewer than `LEAST_REFRESHES`."""
    return None if len(values) < LEAST_REFRESHES else student_interval(values)


def rise(values: Sequence[float]) -> Interval | None:
    """Mean of the last third minus mean of the first tenth (five values or more), with Welch's 95 % interval; None for
    too few values. The beginning is short because rewards rise fast at first.

    Every rollout has other prompts, so that the noise of one step says little about the next.
    """
    if len(values) < LEAST_STEPS:
        return None
    first, last = np.asarray(values[: max(5, len(values) // 10)]), np.asarray(values[-(len(values) // 3) :])
    difference = float(last.mean() - first.mean())
    if max(np.ptp(first), np.ptp(last)) <= CONSTANT * np.abs(values).max():
        return Interval(difference, difference, difference)
    from scipy.stats import ttest_ind  # slow to import

    low, high = ttest_ind(last, first, equal_var=False).confidence_interval(LEVEL)
    return Interval(difference, float(low), float(high))
