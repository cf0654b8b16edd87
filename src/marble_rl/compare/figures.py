"""The figures of a table: means with intervals, composites, paired differences."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

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


class Figures:
    """Of all methods of one table; M is the number of rewards.

    The composite of a method is that of the table of means: x_m the mean over the method's seeds, then the mean over
    rewards of (x_m - mean_m x_m) / std_m x_m. For its interval each seed has a composite of its own. What a seed does
    to all methods alike (its evaluation noise, say) is no difference between methods, so it is taken out first:

        e_s = mean over the methods with seed s of (x_ms - x_m),   composite_ms of x_ms - (e_s - mean over m's seeds)

    If all methods have the same seeds, that is the composite relative to the mean of the methods in seed s.
    """

    def __init__(self, by_method: Mapping[str, Sequence[JobResult]], rewards: Sequence[str]) -> None:
        self._rewards = list(rewards)
        self._results = [result for group in by_method.values() for result in group]
        means = {name: self._values(group).mean(axis=0) for name, group in by_method.items()}
        self._scale = Scale.of(np.stack(list(means.values())))
        self._effects = {
            seed: np.mean([self._values([r])[0] - means[r.method] for r in self._with_seed(seed)], axis=0)
            for seed in {result.seed for result in self._results}
        }

    def of(self, group: Sequence[JobResult]) -> dict[str, Interval]:
        """By reward, and the composite, of the results of one method."""
        values = self._values(group)
        effects = np.stack([self._effects[result.seed] for result in group])
        composites = self._scale.composite(values - (effects - effects.mean(axis=0)))
        if len(group) > 1:
            return self._named([over_seeds(column) for column in (*values.T, composites)])
        resampled = self._resampled(group[0])
        composite = self._scale.composite(resampled - self._resampled_effect(group[0].seed))
        columns = zip((*values[0], composites[0]), (*resampled.T, composite), strict=True)
        return self._named([over_prompts(float(mean), draws) for mean, draws in columns])

    def z(self, group: Sequence[JobResult]) -> dict[str, float]:
        """By reward: the z-score of the method's mean."""
        return dict(zip(self._rewards, self._scale.z(self._values(group).mean(axis=0)).tolist(), strict=True))

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
        """[R, M]: what a draw of prompts does to all methods with this seed alike."""
        moved = [self._resampled(result) - self._values([result]) for result in self._with_seed(seed)]
        return np.asarray(np.mean(moved, axis=0), dtype=np.float64)
