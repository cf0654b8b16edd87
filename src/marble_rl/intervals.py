"""How sure a mean is: its 95 % interval, by Student's t or by the bootstrap."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 2
"""Values that an interval can be made from: one resampled is always itself, and would look certain."""
DECIMALS = 4
"""Of scores and their differences, in printed tables."""
AT_ONCE = 1 << 20
"""Values drawn at a time: a few megabytes, however many prompts there are."""


@dataclass(frozen=True)
class Interval:
    """A mean, or a difference of means, with both ends of its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int | None = None
    """In a comparison: the number of seeds."""
    over: Literal["seeds", "prompts", "nothing"] | None = None
    """In a comparison. seeds: Student's t over the means of n seeds. prompts: bootstrap over the prompts of the only
    seed. nothing: that seed has a score of one prompt only, and there is no interval."""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def sign(self) -> Literal[-1, 0, 1]:
        """1 or -1 where zero lies below or above the interval, else 0. Its ends count as tables print them: a change
        that reads `+0.0000 .. +0.0000` is none."""
        return 1 if round(self.low, DECIMALS) > 0 else -1 if round(self.high, DECIMALS) < 0 else 0

    @property
    def significant(self) -> bool:
        """Whether zero lies outside. Never for methods with one seed each: two trainings of one method differ, too."""
        return self.over in (None, "seeds") and self.sign != 0

    @model_serializer(mode="wrap")
    def _without_nulls(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in fields(self).items() if value is not None}


def paired_difference(before: Tensor, after: Tensor, seed: int = 0) -> Interval:
    """Mean of ``after - before`` ([n] values, one a prompt), with a percentile interval over resampled prompts."""
    return resampled_mean((after - before).to(torch.float64).numpy(), seed)


def resampled_mean(values: npt.NDArray[np.float64], seed: int = 0) -> Interval:
    """Mean of [n] independent values with its percentile interval, by the bootstrap."""
    dice = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    at_once = max(1, AT_ONCE // len(values))
    for start in range(0, RESAMPLES, at_once):
        part = means[start : start + at_once]
        part[:] = values[dice.integers(len(values), size=(len(part), len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def student_interval(values: Sequence[float] | npt.NDArray[np.float64]) -> Interval:
    """Of the mean of n >= 2 values: mean +- t(0.975, n - 1) s / sqrt(n), with s their sample standard deviation."""
    n = len(values)
    mean = float(np.mean(values))
    reach = student_reach(float(np.var(values, ddof=1)) / n, n - 1)
    return Interval(mean, mean - reach, mean + reach)


def student_reach(squared_error: float, freedom: float, level: float = LEVEL) -> float:
    """Half the width of an interval, from the squared standard error and its degrees of freedom."""
    return _student_quantile(freedom, level) * math.sqrt(squared_error)


@functools.lru_cache
def _student_quantile(freedom: float, level: float) -> float:
    from scipy.stats import t  # a second to import, which commands without intervals should not pay

    return float(t.ppf((1 + level) / 2, freedom))
