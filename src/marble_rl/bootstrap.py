"""How sure a difference between two sets of weights is: the bootstrap over prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RESAMPLES = 10_000
LEVEL = 0.95


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
    dice = np.random.default_rng(seed)
    rows = dice.integers(len(differences), size=(RESAMPLES, len(differences)))
    low, high = np.quantile(differences[rows].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(differences.mean()), float(low), float(high))
