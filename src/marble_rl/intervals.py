"""How sure a difference between two sets of weights is: the bootstrap over prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RESAMPLES = 10_000
LEVEL = 0.95
FEWEST = 2
"""Values that an interval can be made from: one resampled is always itself, and would look certain."""
AT_ONCE = 1 << 20
"""Values drawn at a time: a few megabytes, however many prompts there are."""


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def paired_difference(before: Tensor, after: Tensor, seed: int = 0) -> Difference:
    """Mean of ``after - before`` ([n] values, one a prompt), with a percentile interval over resampled prompts."""
    differences = (after - before).to(torch.float64).numpy()
    return Difference(*resampled_mean(differences, seed))


def resampled_mean(values: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """Mean of [n] independent values, and both ends of its percentile interval."""
    dice = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    at_once = max(1, AT_ONCE // len(values))
    for start in range(0, RESAMPLES, at_once):
        part = means[start : start + at_once]
        part[:] = values[dice.integers(len(values), size=(len(part), len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(values.mean()), float(low), float(high)


def student_mean(values: Sequence[float] | npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean of n >= 2 values, and both ends of its interval: mean +- t(0.975, n - 1) s / sqrt(n), s their sample std."""
    n = len(values)
    mean = float(np.mean(values))
    reach = student_reach(float(np.var(values, ddof=1)) / n, n - 1)
    return mean, mean - reach, mean + reach


def student_reach(squared_error: float, freedom: float) -> float:
    """Half the width of a 95 % interval, from the squared standard error and its degrees of freedom."""
    from scipy.special import stdtrit  # a second to import, which no other use of a run should pay

    return float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(squared_error)
