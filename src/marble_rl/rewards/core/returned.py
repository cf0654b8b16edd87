"""What a reward returned: one number for each image, or a named failure."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import numpy as np
import torch

from marble_rl.errors import count_of, shortened
from marble_rl.rewards.core.base import LARGEST_SCORE, NotedScore

SHOWN = 200
"""Characters of a wrong result that a message shows."""


class BadScore(ValueError):
    """A reward did not return one usable score for each image."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


def checked(scores: object, images: int, allowed: tuple[float, float]) -> list[float | None]:
    """The scores of so many images, checked: each is None, or a finite number in the reward's range."""
    listed = _listed(scores)
    if len(listed) != images:
        raise BadScore(f"returned {count_of(len(listed), 'score')} for {count_of(images, 'image')}")
    found = [None if score is None else _number(score, row) for row, score in enumerate(listed)]
    low, high = allowed
    for row, number in enumerate(found):
        if number is None:
            continue
        if not math.isfinite(number):
            raise BadScore(f"returned {number} for image {row} of its batch", row)
        if abs(number) > LARGEST_SCORE:
            raise BadScore(
                f"returned {number} for image {row} of its batch; scores must lie within ±{LARGEST_SCORE:g}, so that "
                "their statistics are finite",
                row,
            )
        if not low <= number <= high:
            raise BadScore(f"returned {number} for image {row} of its batch, outside its range [{low}, {high}]", row)
    return found


def _listed(scores: object) -> Sequence[object]:
    """Other containers are refused, even where Python could iterate: a dict or a set would give its keys, in an order
    that is not that of the images."""
    if isinstance(scores, list | tuple):
        return scores
    if isinstance(scores, np.ndarray | torch.Tensor):
        if scores.ndim != 1:
            raise BadScore(f"returned an array of shape {list(scores.shape)}; its shape must be [images]")
        if isinstance(scores, torch.Tensor) or scores.dtype.kind in "biufO":
            return scores.tolist()
    raise BadScore(
        f"returned {shortened(repr(scores), SHOWN)} ({type(scores).__name__}) in place of one score for each image: a "
        "list, a NumPy array or a tensor"
    )


def _number(score: object, row: int) -> float:
    """A text is no number, even where Python would read one from it: the reward that returns it has a bug. True and
    False are 1 and 0."""
    if isinstance(score, NotedScore):
        return score
    if isinstance(score, np.ndarray | np.bool_ | torch.Tensor) and score.ndim == 0:
        score = score.tolist()
    if isinstance(score, numbers.Real):
        try:
            return float(score)
        except OverflowError:
            raise BadScore(f"returned an integer for image {row} of its batch that is beyond all floats", row) from None
    shown = f"{shortened(repr(score), SHOWN)} ({type(score).__name__})"
    raise BadScore(f"returned {shown} for image {row} of its batch, not a number", row)
