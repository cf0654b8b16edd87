"""What a reward is.

A reward scores uint8 images for their prompts, one finite number each. Whether it applies to a prompt is asked
before any image is scored; where it does not apply it is never called. NaN is always an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from marble_rl.types import Prompt

Images = npt.NDArray[np.uint8]
METADATA = "metadata"
"""Argument under which a function gets the prompts' metadata."""


@dataclass(frozen=True)
class RewardBatch:
    """What a reward sees."""

    images: Images
    """[B, H, W, 3] uint8"""
    prompts: Sequence[Prompt]
    """B prompts, with their metadata"""


class Reward(Protocol):
    """The protocol. Derive from `RewardBase` to write only `score`."""

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether this reward has anything to say about images of the prompt."""

    def load(self, device: torch.device) -> None:
        """Load weights. Called once, after the whole config was checked."""

    def score(self, batch: RewardBatch) -> Sequence[float]:
        """One finite score per image; higher is better."""


class RewardBase:
    """A reward that applies to every prompt and has nothing to load."""

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def load(self, device: torch.device) -> None:
        return None


class FunctionReward(RewardBase):
    """A plain function ``f(images, prompts, **meta) -> list[float]`` as a reward.

    ``images`` is a list of [H, W, 3] uint8 arrays, ``prompts`` a list of strings, and ``meta`` holds ``metadata``
    (a dict per image; only if the function takes it) and the ``params`` of the config.
    """

    def __init__(self, function: Callable[..., Sequence[float]], **params: Any) -> None:
        self.function = function
        self.params = params
        arguments = inspect.signature(function).parameters
        self._takes_metadata = METADATA in arguments or any(p.kind is p.VAR_KEYWORD for p in arguments.values())

    def score(self, batch: RewardBatch) -> Sequence[float]:
        metadata = {METADATA: [dict(prompt.metadata) for prompt in batch.prompts]} if self._takes_metadata else {}
        return self.function(list(batch.images), [prompt.text for prompt in batch.prompts], **metadata, **self.params)
