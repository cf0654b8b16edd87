"""The record of the base model's scores of the guards, `base_scores.json` in a run's folder.

It is a cache: scores that are missing are computed again, with the same result (training/base_images.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from marble_rl.storage import Record


@dataclass(frozen=True)
class BaseScore:
    """Scores of one prompt's images by one reward."""

    images: PositiveInt
    mean: float
    squares: NonNegativeFloat
    """Sum of the squared deviations from the mean"""

    @classmethod
    def of(cls, scores: Sequence[float]) -> BaseScore:
        mean = fmean(scores)
        return cls(len(scores), mean, sum((score - mean) ** 2 for score in scores))


class BaseScores(Record):
    """Scores of the model without adapter."""

    kind: ClassVar[str] = "a record of base scores"
    fix: ClassVar[str] = "They are computed again"

    made_with: dict[str, Any]
    """The settings that the images follow from"""
    prompts: dict[int, dict[str, BaseScore]]
    """By index of the prompt and name of the guard; a guard that has no score for a prompt is left out"""
