"""The figures of a table: means with intervals, composites, paired differences."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from marble_rl.compare.results import JobResult
from marble_rl.compare.statistics import (
    COMPOSITE,
    Array,
    Interval,
    Scale,
    as_array,
    over_prompts,
    over_seeds,
    resampled_means,
)
from marble_rl.student import student_reach


class Figures:
    """Of all methods of one table; M is the number of rewards.

    What a seed does to all methods alike (its evaluation noise, say) is no difference between methods. So scores are
    taken apart, x_ms = a_m + b_s + rest, by least squares over the jobs there are, sum_s b_s = 0; and the composite of
    a method is that of the table of a_m: the mean over rewards of (a_m - mean_m a_m) / std_m a_m. A method with fewer
    seeds gains or loses nothing by which ones they are. If all have the same seeds, a_m is the mean over them.

    The composite's interval goes by what is left, x_ms - a_m - b_s, on seeds that other methods have too: elsewhere
    b_s would take it all. b_s, fitted to the M_s methods with the seed, takes 1/M_s of its variance, which is put back.
    """

    def __init__(self, by_method: Mapping[str, Sequence[JobResult]], rewards: Sequence[str]) -> None:
        self._rewards = list(rewards)
        self._results = [result for group in by_method.values() for result in group]
        self._effects = self._seed_effects()
        self._scale = Scale.of(np.stack([self._without_seeds(group).mean(axis=0) for group in by_method.values()]))

    def of(self, group: Sequence[JobResult]) -> dict[str, Interval]:
        """By reward, and the composite, of the results of one method."""
        values = self._values(group)
        mean = float(self._scale.composite(self._without_seeds(group).mean(axis=0)))
        if len(group) > 1:
            return self._named([*(over_seeds(column) for column in values.T), self._composite_over_seeds(mean, group)])
        (result,) = group
        resampled = self._resampled(result)
        drawn = mean + self._put_back(result.seed) * self._composite_change(
            resampled - values - self._resampled_effect(result.seed)
        )
        columns = zip((*values[0], mean), (*resampled.T, drawn), strict=True)
        return self._named([over_prompts(float(mean), draws) for mean, draws in columns])

    def _composite_over_seeds(self, mean: float, group: Sequence[JobResult]) -> Interval:
        """Over the seeds shared with other methods; where there are not two, over all, with what seeds do in it."""
        shared = [result for result in group if len(self._with_seed(result.seed)) > 1]
        if len(shared) < 2:
            found = over_seeds(self._scale.composite(self._values(group)))
            return replace(found, mean=mean, low=mean - found.half_width, high=mean + found.half_width)
        rest = self._without_seeds(shared)
        left = self._composite_change(rest - rest.mean(axis=0)) * [self._put_back(result.seed) for result in shared]
        reach = student_reach(float(left @ left) / (len(shared) - 1) / len(shared), len(shared) - 1)
        return Interval(mean, mean - reach, mean + reach, len(shared), "seeds")

    def _composite_change(self, change: Array) -> Array:
        """What a change of scores [..., M] does to the composite [...]."""
        return self._scale.composite(self._scale.centre + change)

    def _put_back(self, seed: int) -> float:
        """sqrt(M_s / (M_s - 1)); 1 where no other method has the seed, and nothing was taken."""
        methods = len(self._with_seed(seed))
        return math.sqrt(methods / (methods - 1)) if methods > 1 else 1.0

    def z(self, group: Sequence[JobResult]) -> dict[str, float]:
        """By reward: the z-score of the method's a_m."""
        return dict(zip(self._rewards, self._scale.z(self._without_seeds(group).mean(axis=0)).tolist(), strict=True))

    def differences(self, group: Sequence[JobResult], reference: Sequence[JobResult]) -> dict[str, Interval]:
        """Of results with the same seed: same prompts, same noise in training and evaluation. Empty without any."""
        others = {result.seed: result for result in reference}
        pairs = [(result, others[result.seed]) for result in group if result.seed in others]
        if not pairs:
            return {}
        ours, theirs = (self._with_composite(self._values(side)) for side in zip(*pairs, strict=True))
        values = ours - theirs
        if len(pairs) > 1:
            return self._named([over_seeds(column) for column in values.T])
        ours, theirs = (self._with_composite(self._resampled(result)) for result in pairs[0])
        columns = zip(values[0], (ours - theirs).T, strict=True)
        return self._named([over_prompts(float(mean), draws) for mean, draws in columns])

    def _named(self, intervals: Sequence[Interval]) -> dict[str, Interval]:
        return dict(zip([*self._rewards, COMPOSITE], intervals, strict=True))

    def _values(self, results: Sequence[JobResult]) -> Array:
        """[n, M]"""
        return np.array([[result.means[name] for name in self._rewards] for result in results], dtype=np.float64)

    def _without_seeds(self, results: Sequence[JobResult]) -> Array:
        """[n, M]: x_ms - b_s"""
        return self._values(results) - np.stack([self._effects[result.seed] for result in results])

    def _seed_effects(self) -> dict[int, Array]:
        """b_s [M] by seed. Least squares after each method's mean is taken out of scores and seeds."""
        seeds = sorted({result.seed for result in self._results})
        methods = np.array([result.method for result in self._results])
        same = (methods[:, None] == methods[None, :]).astype(np.float64)
        centre = np.eye(len(methods)) - same / same.sum(axis=1, keepdims=True)
        is_seed = np.array([[result.seed == seed for seed in seeds] for result in self._results], dtype=np.float64)
        effects = np.linalg.pinv(centre @ is_seed) @ (centre @ self._values(self._results))
        return dict(zip(seeds, effects, strict=True))

    def _with_composite(self, values: Array) -> Array:
        """[n, M] -> [n, M + 1]"""
        return np.concatenate([values, self._scale.composite(values)[:, None]], axis=1)

    def _resampled(self, result: JobResult) -> Array:
        """[R, M]"""
        return resampled_means(as_array([result.per_prompt[name] for name in self._rewards]))

    def _with_seed(self, seed: int) -> list[JobResult]:
        return [result for result in self._results if result.seed == seed]

    @functools.cache  # noqa: B019  lives as long as one table is made
    def _resampled_effect(self, seed: int) -> Array:
        """[R, M]: what a draw of prompts does to all methods with this seed alike; 0 where there is only one."""
        others = self._with_seed(seed)
        if len(others) == 1:
            return np.zeros((1, len(self._rewards)))
        moved = [self._resampled(result) - self._values([result]) for result in others]
        return np.asarray(np.mean(moved, axis=0), dtype=np.float64)
