"""Whether an image shows the colour that its prompt names: a specialist reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits
from marble_rl.section import Section
from marble_rl.types import Prompt

COLOURS = {
    "red": (1, -0.5, -0.5),
    "green": (-0.5, 1, -0.5),
    "blue": (-0.5, -0.5, 1),
    "yellow": (0.5, 0.5, -1),
    "purple": (0.5, -1, 0.5),
    "cyan": (-1, 0.5, 0.5),
}
"""Directions away from grey."""


class Colour(RewardBase):
    """How much redder (greener, ...) than grey the image is on average, in [-1, 1].

    With ``colour`` it is that colour for every prompt. Without, it is the one that the prompt names, and the reward
    applies only to prompts that name exactly one of the six.
    """

    class Params(Section):
        colour: Literal["red", "green", "blue", "yellow", "purple", "cyan"] | None = None
        """The colour wanted for every prompt; null: the one that the prompt names."""

    params: Params
    traits = Traits(range=(-1.0, 1.0), deterministic=True)

    def applies_to(self, prompt: Prompt) -> bool:
        return len(self._wanted(prompt)) == 1

    def score(self, batch: RewardBatch) -> Sequence[float]:
        means = batch.images.mean(axis=(1, 2)) / 255.0
        directions = np.array([COLOURS[self._wanted(prompt)[0]] for prompt in batch.prompts])
        return [float(score) for score in (means * directions).sum(axis=1)]

    def _wanted(self, prompt: Prompt) -> list[str]:
        if self.params.colour is not None:
            return [self.params.colour]
        words = set(re.findall(r"[a-z]+", prompt.text.lower()))
        return [colour for colour in COLOURS if colour in words]
