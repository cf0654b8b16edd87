"""Time to score: how long a method trains until its rewards are where another method ends.

    progress(t) = mean share after t seconds of training: a monotone fit over a training's evaluations, 0 at the start
    level       = f * (progress of the reference at its end, mean over its seeds)
    time        = the first t with progress(t) >= level, on straight lines between the evaluations

A training that never gets there has no time. `marble compare --curve N` evaluates every N steps; that time is not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marble_rl.compare.job_result import JobResult
from marble_rl.compare.shares import Shares
from marble_rl.compare.statistics import Array, over_seeds
from marble_rl.intervals import Interval

FRACTIONS = (0.5, 0.8)
"""f: of the reference's mean share at its end"""


@dataclass(frozen=True)
class TimeToScore:
    """Of one method and one level."""

    fraction: float
    seeds: int
    reached: int
    """Seeds that get there"""
    seconds: float | None
    """Median over the seeds, of which those that do not get there come last; None if the median is one of them"""
    steps: float | None
    """The same in optimizer updates"""
    worst: float | None
    """Mean worst share at that time, of the seeds that get there"""
    faster: Interval | None
    """The reference's seconds divided by this method's: geometric mean over seeds, Student's interval of its logarithm.
    None where a seed of either does not get there."""


@dataclass(frozen=True)
class CurveMean:
    """A point of a method's learning curve: means over its seeds."""

    step: int
    seconds: float
    worst: float
    mean: float


@dataclass(frozen=True)
class _Curve:
    """Of one training, T evaluations and the start before them."""

    steps: Array
    """[T + 1]"""
    seconds: Array
    """[T + 1]"""
    worst: Array
    """[T + 1]: worst share"""
    mean: Array
    """[T + 1]: mean share"""

    @property
    def progress(self) -> Array:
        """[T + 1]: the monotone fit of the mean share."""
        from scipy.optimize import isotonic_regression

        fit = np.asarray(isotonic_regression(self.mean[1:]).x, dtype=np.float64)
        return np.concatenate([[0.0], fit.clip(min=0.0)])

    def reaching(self, level: float) -> float:
        """The place on the curve, in evaluations from the start, where ``level`` is reached; infinite if nowhere."""
        progress = self.progress
        after = int(np.searchsorted(progress, level))
        if after == len(progress):
            return math.inf
        if after == 0:
            return 0.0
        return after - float((progress[after] - level) / (progress[after] - progress[after - 1]))

    def at(self, place: float, values: Array) -> float:
        """One of the rows above at a place between two evaluations."""
        return float(np.interp(place, np.arange(len(values)), values)) if math.isfinite(place) else math.inf


def learning_curve(group: Sequence[JobResult], shares: Shares) -> list[CurveMean]:
    """Of one method, at the steps that all its seeds were evaluated at; empty without shares."""
    curves = list(_curves(group, shares).values())
    if not curves:
        return []
    common = set.intersection(*(set(curve.steps.tolist()) for curve in curves)) - {0.0}
    points = []
    for step in sorted(common):
        rows = [(curve, int(np.flatnonzero(curve.steps == step)[0])) for curve in curves]
        seconds, worst, mean = (
            float(np.mean([getattr(curve, name)[i] for curve, i in rows])) for name in ("seconds", "worst", "mean")
        )
        points.append(CurveMean(int(step), seconds, worst, mean))
    return points


def times_to_score(group: Sequence[JobResult], reference: Sequence[JobResult], shares: Shares) -> list[TimeToScore]:
    """One for each of FRACTIONS; none where one of them has no curve, clocks differ, or the reference gains nothing."""
    ours, theirs = _curves(group, shares), _curves(reference, shares)
    clocks = {result.clock for result in (*group, *reference) if result.curve}
    if not ours or not theirs or len(clocks) > 1:
        return []
    end = float(np.mean([curve.progress[-1] for curve in theirs.values()]))
    if end <= 0:
        return []
    return [_time(fraction, fraction * end, ours, theirs) for fraction in FRACTIONS]


def _time(fraction: float, level: float, ours: Mapping[int, _Curve], theirs: Mapping[int, _Curve]) -> TimeToScore:
    places = {seed: curve.reaching(level) for seed, curve in ours.items()}
    seconds = {seed: ours[seed].at(place, ours[seed].seconds) for seed, place in places.items()}
    steps = [ours[seed].at(place, ours[seed].steps) for seed, place in places.items()]
    got_there = [seed for seed, place in places.items() if math.isfinite(place)]
    worst = [ours[seed].at(places[seed], ours[seed].worst) for seed in got_there]
    others = {seed: curve.at(curve.reaching(level), curve.seconds) for seed, curve in theirs.items() if seed in ours}
    ratios = np.array([other / seconds[seed] for seed, other in others.items()])
    return TimeToScore(
        fraction,
        len(ours),
        len(got_there),
        _finite(float(np.median(list(seconds.values())))),
        _finite(float(np.median(steps))),
        float(np.mean(worst)) if worst else None,
        _geometric(ratios) if len(got_there) == len(ours) else None,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _geometric(ratios: Array) -> Interval | None:
    """None with fewer than two seeds in common, or where the other side does not get there."""
    if len(ratios) < 2 or not np.isfinite(ratios).all() or (ratios <= 0).any():
        return None
    logarithm = over_seeds(np.log(ratios))
    mean, low, high = map(math.exp, (logarithm.mean, logarithm.low, logarithm.high))
    return replace(logarithm, mean=mean, low=low, high=high)


def _curves(group: Sequence[JobResult], shares: Shares) -> dict[int, _Curve]:
    """By seed that has one, and whose base model was run."""
    curves = {}
    for result in group:
        points = [(point, shares.after(result, point.means)) for point in result.curve]
        known = [(point, found) for point, found in points if found is not None]
        if not known:
            continue
        rows = [(0.0, 0.0, 0.0, 0.0), *((float(p.step), p.seconds, worst, mean) for p, (worst, mean) in known)]
        curves[result.seed] = _Curve(*np.array(rows).T)
    return curves
