"""An image reward for videos: it scores frames, and their scores become one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from marble_rl.errors import InputError
from marble_rl.rewards.core.base import RewardBase, RewardBatch, Scores, Traits, traits_of
from marble_rl.rewards.core.registry import build_reward
from marble_rl.rewards.core.returned import checked
from marble_rl.rewards.core.settings import RewardChoice
from marble_rl.section import Section
from marble_rl.types import Prompt


class Frames(RewardBase):
    """An image reward on the frames of a video: their mean score, the worst, both, the best or the last.

    Frames without a score do not count. A video has no score if none of its frames has one.
    """

    class Params(Section):
        reward: RewardChoice
        """`type` and `params` of the image reward, as in an entry of `rewards`. Other settings, such as `device`,
        belong to the entry of `frames`."""
        frames: Literal["all", "first", "last"] | Annotated[int, Field(ge=2)] = "all"
        """`all`, `first`, `last`, or a number of at least 2: so many frames, evenly spaced from the first to the last
        (all, where the video has fewer)."""
        reduce: Literal["mean", "worst", "steady", "best", "last"] = "mean"
        """Which of the frames' scores is the video's: their `mean`, the `worst`, halfway between these two (`steady`),
        the `best`, or the `last`."""

    params: Params
    traits = Traits(media="video")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.reward = build_reward(self.params.reward, "reward")
        if traits_of(self.reward).media != "image":
            kind = self.params.reward.type
            raise InputError(f"reward.type: {kind!r} scores videos; use it by itself, without `frames`")
        self._take_traits()

    def _take_traits(self) -> None:
        inner = traits_of(self.reward)
        self._most_frames = inner.batch_size
        # `score` divides its frames into batches of this size; a call may hold any number of videos. The frames that it
        # chooses are a copy already, which the reward may change.
        self.traits = replace(inner, media="video", batch_size=None, writes_images=False)

    def applies_to(self, prompt: Prompt) -> bool:
        return self.reward.applies_to(prompt)

    def load(self, device: torch.device) -> None:
        self.reward.load(device)
        self._take_traits()  # a reward on another machine learns its traits only when it loads

    def score(self, batch: RewardBatch) -> Scores:
        chosen = chosen_frames(self.params.frames, batch.images.shape[1])
        images = batch.images[:, chosen].reshape(-1, *batch.images.shape[2:])
        prompts = [prompt for prompt in batch.prompts for _ in chosen]
        step = self._most_frames or len(images)
        scores: list[float | None] = []
        for start in range(0, len(images), step):
            part = RewardBatch(images[start : start + step], prompts[start : start + step])
            with _errors_by_video(start, len(chosen)):
                # Checked here: a bad score could disappear in the mean or the worst.
                scores += checked(self.reward.score(part), len(part.prompts), self.traits.range)
        return [self._reduced(scores[i : i + len(chosen)]) for i in range(0, len(scores), len(chosen))]

    def _reduced(self, scores: Sequence[float | None]) -> float | None:
        known = [score for score in scores if score is not None]
        if not known:
            return None
        low, high = min(known), max(known)
        if self.params.reduce == "last":
            return known[-1]
        mean = min(max(math.fsum(known) / len(known), low), high)  # rounding must not leave the reward's range
        if self.params.reduce == "mean":
            return mean
        worst, best = (low, high) if self.traits.higher_is_better else (high, low)
        return {"worst": worst, "best": best, "steady": mean / 2 + worst / 2}[self.params.reduce]


@contextmanager
def _errors_by_video(start: int, frames: int) -> Iterator[None]:
    """Errors raised inside name a row of the frames from ``start`` on; make that the row of a video of ``frames``."""
    try:
        yield
    except Exception as error:
        row = getattr(error, "row", 0)
        with suppress(AttributeError):  # if it cannot be set, the error itself still matters more
            error.row = (start + (row if isinstance(row, int) else 0)) // frames  # type: ignore[attr-defined]
        raise


def chosen_frames(frames: str | int, count: int) -> list[int]:
    """Indices of the frames to be scored, of ``count``."""
    if isinstance(frames, int):
        places = np.linspace(0, count - 1, min(frames, count)).round()
        return [int(place) for place in places]
    return {"all": list(range(count)), "first": [0], "last": [count - 1]}[frames]
