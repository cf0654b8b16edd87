"""Z-scores, and how sure a mean is: over seeds where there are several, else over prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from marble_rl.intervals import FEWEST, LEVEL, RESAMPLES, Interval, student_interval

Array = NDArray[np.float64]
COMPOSITE = "composite"
LEAST_METHODS = 3
"""Of a composite, the base model counted: of two methods every z-score is +1 or -1, however little they differ."""


def prompt_means(scores: Array) -> Array:
    """[P, M] -> [M], over the prompts with a score; NaN where there is none."""
    known = np.isfinite(scores)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, scores, 0.0).sum(axis=0) / known.sum(axis=0), dtype=np.float64)


def over_seeds(values: Array) -> Interval:
    """Student's interval of the n >= 2 seeds' values [n]."""
    return replace(student_interval(values), n=len(values), over="seeds")


def over_prompts(mean: float, resampled: Array, prompts: int) -> Interval:
    """Percentile interval of one seed's mean over ``prompts``, from its values [R] under resampled ones."""
    if prompts < FEWEST:
        return Interval(mean, mean, mean, 1, "nothing")
    known = resampled[np.isfinite(resampled)]
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if known.size else (mean, mean)
    return Interval(mean, float(low), float(high), 1, "prompts")


def resampled_means(per_prompt: Array) -> Array:
    """[P, M] scores, NaN where a reward does not apply -> [R, M] means over resampled prompts.

    The draws are the same for every table of P prompts, so differences of two results are paired by prompt. NaN where
    a reward applies to none of the prompts drawn.
    """
    counts = _draws(len(per_prompt))
    applies = np.isfinite(per_prompt)
    with np.errstate(invalid="ignore"):
        return np.asarray((counts @ np.where(applies, per_prompt, 0.0)) / (counts @ applies), dtype=np.float64)


@functools.lru_cache(maxsize=1)
def _draws(prompts: int) -> Array:
    """[R, P]: how often each prompt is drawn."""
    dice = np.random.default_rng(0)
    return dice.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES).astype(np.float64)


@dataclass(frozen=True)
class Scale:
    """Mean and population std of each column over the table's rows: what z-scores are relative to. Both [M]."""

    centre: Array
    spread: Array

    @classmethod
    def of(cls, table: Array) -> Scale:
        """``table`` [rows, M]."""
        return cls(table.mean(axis=0), table.std(axis=0))

    def z(self, values: Array) -> Array:
        """[..., M]; 0 in a column in which all rows are equal (up to rounding)."""
        constant = self.spread <= 1e-12 * np.maximum(1e-300, np.abs(self.centre))
        return np.where(constant, 0.0, (values - self.centre) / np.where(constant, 1.0, self.spread))

    def composite(self, values: Array) -> Array:
        """[..., M] -> [...]: the mean over metrics of the z-scores. Linear in the values but for a constant."""
        return np.asarray(self.z(values).mean(axis=-1), dtype=np.float64)
