"""What a reward is.

A reward scores uint8 images or videos for their prompts, one finite number each. Whether it applies to a prompt is
asked before any image is scored; where it does not apply it is never called. An image that it cannot judge, although
its prompt suggested it could, gets None. NaN is always an error.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from marble_rl.types import Media, Prompt

Images = npt.NDArray[np.uint8]
Scores = Sequence[float | None]
"""One finite number for each image; None where the reward has nothing to say about it."""
Precision = Literal["float32", "bfloat16", "float16"]
METADATA = "metadata"
"""Argument under which a function gets the prompts' metadata."""


@dataclass(frozen=True)
class Traits:
    """What a reward declares about itself. The first three can be overruled by its entry in the config."""

    batch_size: int | None = None
    """Most images in one call; None takes them as they come."""
    device: str | None = None
    """Where it has to run, such as `cpu`; None: where the trained model is."""
    precision: Precision = "float32"
    """Lower ones run its torch operations under autocast."""
    range: tuple[float, float] = (-math.inf, math.inf)
    """Lowest and highest score there can be. One beyond it is an error."""
    higher_is_better: bool = True
    """If not, its scores count with the opposite sign everywhere."""
    deterministic: bool = False
    """The same images and prompts always get the same scores, so a batch seen before need not be scored again."""
    media: Media = "image"
    """What it scores: [B, H, W, 3] or [B, F, H, W, 3]."""
    concurrency: int | None = None
    """Batches under way at once, for a reward that waits for other machines. None: it computes here, one batch at a
    time, and takes turns with the other rewards on its device."""
    retries: int = 1
    """Further attempts after a failure, where the config does not say."""


@dataclass(frozen=True)
class RewardBatch:
    """What a reward sees."""

    images: Images
    """[B, H, W, 3] uint8, for videos [B, F, H, W, 3]"""
    prompts: Sequence[Prompt]
    """B prompts, with their metadata"""


class Reward(Protocol):
    """The protocol. Derive from `RewardBase` to write only `score`."""

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether this reward has anything to say about images of the prompt."""

    def load(self, device: torch.device) -> None:
        """Load weights. Called once, after the whole config was checked."""

    def score(self, batch: RewardBatch) -> Scores:
        """One finite score per image, or None."""


_give_up_at: ContextVar[float | None] = ContextVar("give_up_at", default=None)


@contextmanager
def giving_up_after(seconds: float) -> Iterator[None]:
    """Around a call for whose answer nobody waits longer, in the thread that makes it."""
    token = _give_up_at.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _give_up_at.reset(token)


def seconds_left() -> float | None:
    """How long this thread's call is still waited for, at least 0; None: until it answers."""
    end = _give_up_at.get()
    return None if end is None else max(end - time.monotonic(), 0.0)


def traits_of(reward: Reward) -> Traits:
    """What the reward declares; classes that are not derived from `RewardBase` need not declare anything."""
    return getattr(reward, "traits", Traits())


class RewardBase:
    """A reward that applies to every prompt and has nothing to load."""

    traits = Traits()
    repeats = 0
    """Attempts that it repeated itself within its calls; they are counted as failures and retries in the metrics."""

    def applies_to(self, prompt: Prompt) -> bool:
        return True

    def load(self, device: torch.device) -> None:
        return None


class FunctionReward(RewardBase):
    """A plain function ``f(images, prompts, **meta) -> list[float]`` as a reward.

    ``images`` is a list of [H, W, 3] uint8 arrays, ``prompts`` a list of strings, and ``meta`` holds ``metadata``
    (a dict per image; only if the function takes it) and the ``params`` of the config.
    """

    def __init__(self, function: Callable[..., Scores], **params: Any) -> None:
        self.function = function
        self.traits = getattr(function, "traits", Traits())
        self.params = params
        arguments = inspect.signature(function).parameters
        self._takes_metadata = METADATA in arguments or any(p.kind is p.VAR_KEYWORD for p in arguments.values())

    def score(self, batch: RewardBatch) -> Scores:
        metadata = {METADATA: [dict(prompt.metadata) for prompt in batch.prompts]} if self._takes_metadata else {}
        return self.function(list(batch.images), [prompt.text for prompt in batch.prompts], **metadata, **self.params)
