"""What a reward is.

A reward scores uint8 images or videos for their prompts: one finite number each. It is called only for prompts that its
`applies_to` accepts. For an image that it cannot judge, `score` returns None. NaN is always an error.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from marble_rl.section import Section

if TYPE_CHECKING:
    import torch

    from marble_rl.types import Media, Prompt

Images = npt.NDArray[np.uint8]
Scores = Sequence[float | None]
"""One finite number for each image, or None where the reward cannot judge it."""
LARGEST_SCORE = 1e30
"""Scores beyond it, in either direction, are refused: sums of their squares and products must stay finite."""
Precision = Literal["float32", "bfloat16", "float16"]
METADATA = "metadata"
"""Name of the argument by which a function gets the prompts' metadata"""


@dataclass(frozen=True)
class Traits:
    """What a reward declares about itself. Its entry in the config overrides batch_size, device, precision and
    retries."""

    batch_size: int | None = None
    """Most images in one call; None: no limit."""
    device: str | None = None
    """Where it has to run, such as `cpu`; None: where the trained model is."""
    precision: Precision = "float32"
    """With bfloat16 or float16, its torch operations run under autocast."""
    range: tuple[float, float] = (-math.inf, math.inf)
    """Lowest and highest possible score. A score outside is an error."""
    higher_is_better: bool = True
    """If False, its scores are negated before training, logs and evaluations use them."""
    deterministic: bool = False
    """The same images and prompts always get the same scores; `marble rewards check` verifies it."""
    media: Media = "image"
    """What it scores: [B, H, W, 3] or [B, F, H, W, 3]."""
    concurrency: int | None = None
    """Batches in flight at once, for a reward that waits for other machines. None: it computes here, one batch at a
    time, and takes turns with the other rewards on its device."""
    retries: int = 1
    """Retries after a failure."""
    writes_images: bool = False
    """It changes the images that it gets, so each call gets a copy. Otherwise they are read-only."""


class NotedScore(float):
    """A score with a note on what it rests on, such as the text that was read. Reports show it beside the picture."""

    note: str

    def __new__(cls, score: float, note: str) -> NotedScore:
        noted = super().__new__(cls, score)
        noted.note = note
        return noted

    def __neg__(self) -> NotedScore:
        return NotedScore(-float(self), self.note)


@dataclass(frozen=True)
class RewardBatch:
    """The input of a reward."""

    images: Images
    """[B, H, W, 3] uint8, for videos [B, F, H, W, 3]; read-only, unless the reward declares `writes_images`"""
    prompts: Sequence[Prompt]
    """B prompts, with their metadata"""


class Reward(Protocol):
    """The protocol of a reward. With `RewardBase` as base class only `score` has to be written."""

    def applies_to(self, prompt: Prompt) -> bool:
        """Whether images of the prompt can be scored."""

    def load(self, device: torch.device) -> None:
        """Load weights. Called once, after the whole config was checked."""

    def score(self, batch: RewardBatch) -> Scores:
        """One finite score per image, or None."""


_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline_in(seconds: float | None) -> Iterator[None]:
    """Set a deadline for calls made in this thread; None: they have none."""
    token = _deadline.set(None if seconds is None else time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def seconds_to_deadline() -> float | None:
    """Time left for this thread's call, at least 0; None: it has no deadline."""
    end = _deadline.get()
    return None if end is None else max(end - time.monotonic(), 0.0)


def traits_of(reward: Reward) -> Traits:
    """What the reward declares. Classes that are not derived from `RewardBase` need not declare anything."""
    return getattr(reward, "traits", Traits())


class RewardBase:
    """A reward that applies to every prompt and has nothing to load. Derived classes implement `score`.

    Parameters are declared by a class `Params` inside it: a `Section`, so that unknown keys are refused and the
    docstring under a field is its documentation. Paths of type `ModelPath` and `FilePath` count from the config's
    folder. The checked parameters are in ``self.params``.
    """

    traits = Traits()
    patience = 0.0
    """Seconds that one call may wait for a server, in addition to the `timeout` of the config."""
    repeats = 0
    """Retries that the reward made itself, inside `score`. The metrics count each as a failure and a retry."""
    Params: type[Section] = Section
    """Parameters that the reward takes; none by default."""
    params: Any

    def __init__(self, **params: Any) -> None:
        self.params = self.params_model(params).model_validate(params)

    @classmethod
    def params_model(cls, params: Mapping[str, Any]) -> type[Section]:
        """The model that checks ``params``. Override it if one parameter decides which others there are."""
        return cls.Params

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
        metadata = {METADATA: [copy.deepcopy(dict(p.metadata)) for p in batch.prompts]} if self._takes_metadata else {}
        return self.function(list(batch.images), [prompt.text for prompt in batch.prompts], **metadata, **self.params)
