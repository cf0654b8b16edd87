"""The figures of a table: means with intervals, composites, paired differences."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from marble_rl.compare.job_result import JobResult
from marble_rl.compare.statistics import (
    COMPOSITE,
    LEAST_METHODS,
    Array,
    Scale,
    over_prompts,
    over_seeds,
    prompt_means,
    resampled_means,
)
from marble_rl.intervals import Interval, student_reach

LEAST_LEFT = 0.5
"""Of a method's residual after the fit, in units of one score's variance; below it other methods decide the rest."""
RANK = 1e-9
"""Singular values below this share of the largest are none."""


class Figures:
    """Of all methods of one table; M is the number of rewards.

    What a seed does to all methods alike (its evaluation noise, say) is no difference between methods. So scores are
    taken apart, x_ms = a_m + b_s + rest, by least squares over the jobs there are, sum_s b_s = 0; and the composite of
    a method is that of the table of a_m: the mean over rewards of (a_m - mean_m a_m) / std_m a_m. A method with fewer
    seeds gains or loses nothing by which ones they are. If all have the same seeds, a_m is the mean over them.

    The composite's interval follows from the residuals, r_ms = x_ms - a_m - b_s. The fit, a projection H, takes part of
    them: with B the method's block of 1 - H, sum_s r_ms^2 is trace(B) sigma^2 on average, with trace(B)^2 / trace(B^2)
    degrees of freedom (Satterthwaite). If M methods have the same n seeds, these are (n - 1) (M - 1) / M and n - 1.

    A score of a prompt is the mean over its images, a mean that over the prompts with a score.
    """

    def __init__(self, by_method: Mapping[str, Sequence[JobResult]], rewards: Sequence[str]) -> None:
        self.rewards = list(rewards)
        self.columns = [*rewards, COMPOSITE] if len(by_method) >= LEAST_METHODS else list(rewards)
        """What every method has a figure of."""
        self._results = [result for group in by_method.values() for result in group]
        self._places = {(result.method, result.seed): i for i, result in enumerate(self._results)}
        self._prompts = [
            np.array([result.per_prompt[name] for name in rewards], dtype=np.float64).T for result in self._results
        ]
        """[P, M] of each result; NaN where a reward has no score (None)"""
        self._means = np.stack([prompt_means(scores) for scores in self._prompts])
        self._effects, self._left = self._fit()
        self._scale = Scale.of(np.stack([self._without_seeds(group).mean(axis=0) for group in by_method.values()]))

    def of(self, group: Sequence[JobResult]) -> dict[str, Interval]:
        """By reward, and the composite, of the results of one method."""
        values = self._values(group)
        mean = float(self._scale.composite(self._without_seeds(group).mean(axis=0)))
        if len(group) > 1:
            return self._named([*(over_seeds(column) for column in values.T), self._composite_over_seeds(mean, group)])
        (result,) = group
        scores = self._scores(result)
        resampled = resampled_means(scores)
        drawn = mean + self._put_back(result.seed) * self._composite_change(
            resampled - values - self._resampled_effect(result.seed)
        )
        return self._over_prompts([*values[0], mean], [*resampled.T, drawn], scores)

    def _composite_over_seeds(self, mean: float, group: Sequence[JobResult]) -> Interval:
        """Over the seeds that other methods have, too: of the others the fit leaves no residual. Where it leaves hardly
        any at all, over all of them, effects of the seeds included."""
        here = self._where(group)
        left_by_fit = self._left[np.ix_(here, here)]
        share = float(np.trace(left_by_fit))
        if share < LEAST_LEFT:
            plain = over_seeds(self._scale.composite(self._values(group)))
            return replace(plain, mean=mean, low=mean - plain.half_width, high=mean + plain.half_width)
        rest = self._without_seeds(group)
        left = self._composite_change(rest - rest.mean(axis=0))
        n = int((left_by_fit.diagonal() > RANK).sum())
        reach = student_reach(float(left @ left) / share / n, share**2 / float(np.sum(left_by_fit**2)))
        return Interval(mean, mean - reach, mean + reach, n, "seeds")

    def _composite_change(self, change: Array) -> Array:
        """What a change of scores [..., M] does to the composite [...]."""
        return self._scale.composite(self._scale.centre + change)

    def _put_back(self, seed: int) -> float:
        """sqrt(M_s / (M_s - 1)); 1 where no other method has the seed, and nothing was taken."""
        methods = len(self._with_seed(seed))
        return math.sqrt(methods / (methods - 1)) if methods > 1 else 1.0

    def z(self, group: Sequence[JobResult]) -> dict[str, float]:
        """By reward: the z-score of the method's a_m; empty where there is no composite."""
        if COMPOSITE not in self.columns:
            return {}
        return dict(zip(self.rewards, self._scale.z(self._without_seeds(group).mean(axis=0)).tolist(), strict=True))

    def differences(self, group: Sequence[JobResult], reference: Sequence[JobResult]) -> dict[str, Interval]:
        """Of results with the same seed: same prompts, same noise in training and evaluation. Empty without any.

        A reward may be silent on some images of one method and not of the other: prompts count that both have. A reward
        without any such prompt in one of the seeds has no difference, and then there is none of the composite either.
        """
        pairs = list(self.paired(group, reference).values())
        if not pairs:
            return {}
        sides = (np.stack([prompt_means(scores) for scores in side]) for side in zip(*pairs, strict=True))
        ours, theirs = (self._with_composite(means) for means in sides)
        values = ours - theirs
        if len(pairs) > 1:
            differences = self._named([over_seeds(column) for column in values.T])
        else:
            ours, theirs = (self._with_composite(resampled_means(scores)) for scores in pairs[0])
            differences = self._over_prompts(values[0], (ours - theirs).T, pairs[0][0])
        return {name: difference for name, difference in differences.items() if math.isfinite(difference.mean)}

    def paired(self, group: Sequence[JobResult], reference: Sequence[JobResult]) -> dict[int, tuple[Array, Array]]:
        """By seed that both have: [P, M] scores of both, NaN where one of them has none."""
        others = {result.seed: result for result in reference}
        return {result.seed: self._shared(result, others[result.seed]) for result in group if result.seed in others}

    def _shared(self, one: JobResult, other: JobResult) -> tuple[Array, Array]:
        """[P, M] scores of both, NaN where one of them has none."""
        ours, theirs = self._scores(one), self._scores(other)
        both = np.isfinite(ours) & np.isfinite(theirs)
        return np.where(both, ours, np.nan), np.where(both, theirs, np.nan)

    def _over_prompts(self, means: Iterable[float], drawn: Iterable[Array], scores: Array) -> dict[str, Interval]:
        """Of each reward, then of the composite, which is as sure as the reward with the fewest prompts."""
        prompts = np.isfinite(scores).sum(axis=0).tolist()
        columns = zip(means, drawn, [*prompts, min(prompts)], strict=True)
        return self._named([over_prompts(float(mean), draws, count) for mean, draws, count in columns])

    def _named(self, intervals: Sequence[Interval]) -> dict[str, Interval]:
        """Without the composite where there are too few methods for one."""
        named = zip([*self.rewards, COMPOSITE], intervals, strict=True)
        return {name: interval for name, interval in named if name in self.columns}

    def _where(self, results: Sequence[JobResult]) -> list[int]:
        return [self._places[result.method, result.seed] for result in results]

    def _scores(self, result: JobResult) -> Array:
        """[P, M], NaN where a reward has no score."""
        return self._prompts[self._places[result.method, result.seed]]

    def _values(self, results: Sequence[JobResult]) -> Array:
        """[n, M]"""
        return np.asarray(self._means[self._where(results)], dtype=np.float64)

    def _without_seeds(self, results: Sequence[JobResult]) -> Array:
        """[n, M]: x_ms - b_s"""
        return self._values(results) - np.stack([self._effects[result.seed] for result in results])

    def _fit(self) -> tuple[dict[int, Array], Array]:
        """b_s [M] by seed, and 1 - H [jobs, jobs]. Least squares after each method's mean is taken out of scores and
        seeds; the smallest solution, so that the b_s of seeds that methods connect sum to 0."""
        seeds = sorted({result.seed for result in self._results})
        methods = np.array([result.method for result in self._results])
        same = (methods[:, None] == methods[None, :]).astype(np.float64)
        centre = np.eye(len(methods)) - same / same.sum(axis=1, keepdims=True)
        is_seed = np.array([[result.seed == seed for seed in seeds] for result in self._results], dtype=np.float64)
        solve = np.linalg.pinv(centre @ is_seed, rcond=RANK) @ centre
        effects = solve @ self._values(self._results)
        return dict(zip(seeds, effects, strict=True)), centre - centre @ is_seed @ solve

    def _with_composite(self, values: Array) -> Array:
        """[n, M] -> [n, M + 1]"""
        return np.concatenate([values, self._scale.composite(values)[:, None]], axis=1)

    def _with_seed(self, seed: int) -> list[JobResult]:
        return [result for result in self._results if result.seed == seed]

    @functools.cache  # noqa: B019  lives as long as one table is made
    def _resampled_effect(self, seed: int) -> Array:
        """[R, M]: what a draw of prompts does to all methods with this seed alike; 0 where there is only one."""
        others = self._with_seed(seed)
        if len(others) == 1:
            return np.zeros((1, len(self.rewards)))
        moved = [resampled_means(self._scores(result)) - self._values([result]) for result in others]
        return np.asarray(np.mean(moved, axis=0), dtype=np.float64)
