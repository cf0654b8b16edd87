"""Shares: how much of what a training on one reward alone gains, a joint training gains of it.

    share_k = (gain of reward k in the joint training) / (mean gain of the trainings `only-<k>`)

A gain is a score minus the score of `base` with the same seed, on the prompts that both have a score of. The worst
share is the smallest over the trained rewards, the mean share their mean; both are taken for each seed, then averaged.

A reward whose specialist does not clearly gain (the 95 % t interval of its gain reaches 0, or it has fewer than two
seeds) has no share: the denominator could be anything. It is left out of worst and mean share for every method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marble_rl.compare.figures import Figures
from marble_rl.compare.job_result import JobResult
from marble_rl.compare.methods import BASE, specialist
from marble_rl.compare.statistics import Array, over_prompts, over_seeds, prompt_means, resampled_means
from marble_rl.errors import count_of
from marble_rl.intervals import LEVEL, RESAMPLES, Interval

WORST, MEAN = "worst share", "mean share"
LEAST_SEEDS = 2
"""Of a specialist: one training says nothing about another."""


@dataclass(frozen=True)
class Alone:
    """What the trainings on reward k alone gain: the denominator of its share."""

    mean: float
    low: float
    """End of its 95 % interval; above 0"""
    error: float
    """Standard error of the mean"""
    freedom: int


class Shares:
    """Of all methods of one table; K is the number of rewards that have a share.

    Denominators are noisy, and so is what seeds differ by. The interval of a share, or of the worst or mean share, is
    a Monte Carlo one: in each of `RESAMPLES` draws

        d_k = mean_k + error_k T(n_k - 1)              a denominator, from its own Student distribution
        w_s = min_k (gain_sk / d_k)                    what each seed would be with these (or the mean, or one share)
        w = mean_s w_s + T(n - 1) std_s(w_s) / sqrt(n)

    and the interval is between the 2.5 and 97.5 % quantiles of w. With denominators that are known exactly it is
    Student's interval over seeds. Draws of d_k are not taken below the lower end of its 95 % interval, which is above
    0: a denominator near 0 would make a share of any size.
    """

    def __init__(self, figures: Figures, by_method: Mapping[str, Sequence[JobResult]], trained: Sequence[str]) -> None:
        """``trained``: the rewards that are trained on."""
        self._figures = figures
        self._base = by_method.get(BASE, ())
        self._not_joint = {BASE, *map(specialist, trained)}
        self.left_out: dict[str, str] = {}
        """Rewards without a share, and why."""
        alone: dict[str, Alone] = {}
        if all(name in by_method for name in (BASE, *map(specialist, trained))):
            for reward in trained:
                denominator = self._alone(reward, by_method[specialist(reward)])
                if isinstance(denominator, Alone):
                    alone[reward] = denominator
                else:
                    self.left_out[reward] = denominator
        self.rewards = list(alone)
        """Those with a share; none where the base model or a specialist was not run."""
        self._columns = [figures.rewards.index(reward) for reward in alone]
        self._means = np.array([of.mean for of in alone.values()])
        self._drawn = _draws(list(alone.values()))

    def of(self, group: Sequence[JobResult]) -> dict[str, Interval]:
        """By reward, and the worst and mean share, of the results of one method; empty where there are none."""
        gains = self._gains(group)
        if not gains:
            return {}
        values = _with_summary(np.stack(list(gains.values())) / self._means)
        if len(gains) > 1:
            return self._over_seeds(values, [_with_summary(gain / self._drawn) for gain in gains.values()])
        (seed,) = gains
        return self._over_prompts(values[0], _with_summary(self._resampled(group, seed) / self._drawn), group, seed)

    def differences(
        self, group: Sequence[JobResult], reference: Sequence[JobResult], *, noisy_denominators: bool = False
    ) -> dict[str, Interval]:
        """Of the worst and the mean share, paired by seed; empty without a seed in common.

        Student's t over seeds, with the denominators at their means: they are the same on both sides. Or, with
        ``noisy_denominators``, the Monte Carlo interval in which they vary as well.
        """
        ours, theirs = self._gains(group), self._gains(reference)
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds:
            return {}

        def difference(one: Array, other: Array, denominators: Array) -> Array:
            return _with_summary(one / denominators) - _with_summary(other / denominators)

        values = np.stack([difference(ours[seed], theirs[seed], self._means) for seed in seeds])
        if len(seeds) == 1:
            one, other = (self._resampled(side, seeds[0]) for side in (group, reference))
            intervals = self._over_prompts(values[0], difference(one, other, self._means), group, seeds[0])
        elif noisy_denominators:
            intervals = self._over_seeds(values, [difference(ours[s], theirs[s], self._drawn) for s in seeds])
        else:
            intervals = self._named([over_seeds(column) for column in values.T])
        return {name: intervals[name] for name in (WORST, MEAN)}

    def after(self, result: JobResult, means: Mapping[str, float]) -> tuple[float, float] | None:
        """Worst and mean share if the training of ``result`` had ended with these means of the evaluated images; None
        without shares, or without the base model of its seed."""
        base = next((base for base in self._base if base.seed == result.seed), None)
        if base is None or not self.rewards or result.method in self._not_joint or not means.keys() >= {*self.rewards}:
            return None
        *_, worst, mean = _with_summary(
            np.array([means[name] - base.means[name] for name in self.rewards]) / self._means
        )
        return float(worst), float(mean)

    def by_seed(self, group: Sequence[JobResult]) -> dict[int, dict[str, float]]:
        """{seed: {reward: share}} with the worst and the mean share; of the seeds that the base model has, too."""
        values = {seed: _with_summary(gain / self._means) for seed, gain in self._gains(group).items()}
        return {seed: dict(zip(self._names, of.tolist(), strict=True)) for seed, of in values.items()}

    @property
    def _names(self) -> list[str]:
        return [*self.rewards, WORST, MEAN]

    def _named(self, intervals: Sequence[Interval]) -> dict[str, Interval]:
        return dict(zip(self._names, intervals, strict=True))

    def _over_seeds(self, values: Array, drawn: Sequence[Array]) -> dict[str, Interval]:
        """``values`` [n, K + 2] of n >= 2 seeds, and the same [R, K + 2] of each with denominators that were drawn."""
        n = len(values)
        of_seeds = np.stack(drawn)
        student = _student(np.random.default_rng(1), n - 1)[:, None]
        moved = of_seeds.mean(axis=0) + student * of_seeds.std(axis=0, ddof=1) / math.sqrt(n)
        low, high = np.quantile(moved, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        ends = zip(values.mean(axis=0).tolist(), low.tolist(), high.tolist(), strict=True)
        return self._named([Interval(mean, least, most, n, "seeds") for mean, least, most in ends])

    def _over_prompts(self, values: Array, drawn: Array, group: Sequence[JobResult], seed: int) -> dict[str, Interval]:
        """``values`` [K + 2] of the only seed, and the same [R, K + 2] under resampled prompts."""
        prompts = int(np.isfinite(self._scored(group, seed)[0]).sum(axis=0).min())
        columns = zip(values.tolist(), drawn.T, strict=True)
        return self._named([over_prompts(value, column, prompts) for value, column in columns])

    def _alone(self, reward: str, group: Sequence[JobResult]) -> Alone | str:
        """What the specialist gains, or why it is no denominator."""
        name, column = specialist(reward), self._figures.rewards.index(reward)
        scored = self._figures.paired(group, self._base).values()
        gains = np.array([(prompt_means(ours) - prompt_means(base))[column] for ours, base in scored])
        gains = gains[np.isfinite(gains)]
        if len(gains) < LEAST_SEEDS:
            return f"{name} and {BASE} have {count_of(len(gains), 'seed')} in common, expected two"
        interval = over_seeds(gains)
        if interval.low <= 0:
            ends = f"{interval.mean:+.3g}, 95 % interval {interval.low:+.3g} to {interval.high:+.3g}"
            return f"{name} does not clearly gain ({ends}, {len(gains)} seeds)"
        return Alone(interval.mean, interval.low, float(gains.std(ddof=1)) / math.sqrt(len(gains)), len(gains) - 1)

    def _gains(self, group: Sequence[JobResult]) -> dict[int, Array]:
        """[K] of each seed that the base model has, too, and in which every reward scored a prompt of both. Of joint
        methods only."""
        if not self.rewards or group[0].method in self._not_joint:
            return {}
        seeds = self._figures.paired(group, self._base)
        gains = {seed: np.subtract(*map(prompt_means, self._scored(group, seed))) for seed in seeds}
        return {seed: gain for seed, gain in gains.items() if np.isfinite(gain).all()}

    def _resampled(self, group: Sequence[JobResult], seed: int) -> Array:
        """[R, K] gains under resampled prompts."""
        ours, base = map(resampled_means, self._scored(group, seed))
        return np.asarray(ours - base, dtype=np.float64)

    def _scored(self, group: Sequence[JobResult], seed: int) -> tuple[Array, Array]:
        """[P, K] scores of a method and of the base model, NaN where one of them has none."""
        ours, base = self._figures.paired(group, self._base)[seed]
        return ours[:, self._columns], base[:, self._columns]


def _with_summary(shares: Array) -> Array:
    """[..., K] -> [..., K + 2]: the worst and the mean behind them."""
    summary = [shares.min(axis=-1, keepdims=True), shares.mean(axis=-1, keepdims=True)]
    return np.concatenate([shares, *summary], axis=-1)


def _draws(alone: Sequence[Alone]) -> Array:
    """[R, K] denominators, each from its own Student distribution."""
    dice = np.random.default_rng(0)
    columns = [np.maximum(of.mean + of.error * _student(dice, of.freedom), of.low) for of in alone]
    return np.stack(columns, axis=1) if columns else np.empty((RESAMPLES, 0))


def _student(dice: np.random.Generator, freedom: int) -> Array:
    """[R]: the quantiles of Student's distribution in random order, so that its tails do not depend on luck."""
    from scipy.stats import t  # a second to import, which commands without intervals should not pay

    return np.asarray(t.ppf((dice.permutation(RESAMPLES) + 0.5) / RESAMPLES, freedom), dtype=np.float64)
