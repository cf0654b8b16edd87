"""How sure a mean of a few independent values is: Student's t. (Over many prompts: the bootstrap of bootstrap.py.)"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from marble_rl.bootstrap import LEVEL


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
