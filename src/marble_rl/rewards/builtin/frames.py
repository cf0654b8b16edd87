"""An image reward for videos: it scores frames, and their scores become one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from marble_rl.errors import InputError, suggestion
from marble_rl.rewards.core.base import Reward, RewardBase, RewardBatch, Scores, Traits, traits_of
from marble_rl.rewards.core.calls import checked
from marble_rl.rewards.core.registry import build_reward
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt

KEYS = ("type", "params")
NAMED = ("all", "first", "last")
REDUCTIONS = ("mean", "worst", "best", "last")


class Frames(RewardBase):
    """An image reward on the frames of a video: their mean score, the worst, the best or the last.

    ``reward`` is its `type` and `params`. ``frames`` says which frames it sees: `all`, `first`, `last`, or a number of
    them, evenly spaced from the first to the last (all, where the video has fewer). Frames that it gives no score
    do not count; a video has none if no frame has.
    """

    traits = Traits(media="video")

    def __init__(self, reward: Any, frames: str | int = "all", reduce: str = "mean") -> None:
        _check_frames(frames)
        if reduce not in REDUCTIONS:
            raise InputError(f"reduce: {reduce!r} will not do; give one of {', '.join(REDUCTIONS)}")
        self.frames, self.reduce = frames, reduce
        self.reward = _image_reward(reward)
        self._take_traits()

    def _take_traits(self) -> None:
        inner = traits_of(self.reward)
        self._most_frames = inner.batch_size
        # The number of frames in a call is kept to here, where they are counted; a call may hold any number of videos.
        self.traits = replace(inner, media="video", batch_size=None)

    def applies_to(self, prompt: Prompt) -> bool:
        return self.reward.applies_to(prompt)

    def load(self, device: torch.device) -> None:
        self.reward.load(device)
        self._take_traits()  # a reward on another machine knows its own only now

    def score(self, batch: RewardBatch) -> Scores:
        chosen = chosen_frames(self.frames, batch.images.shape[1])
        images = batch.images[:, chosen].reshape(-1, *batch.images.shape[2:])
        prompts = [prompt for prompt in batch.prompts for _ in chosen]
        step = self._most_frames or len(images)
        scores: list[float | None] = []
        for start in range(0, len(images), step):
            part = RewardBatch(images[start : start + step], prompts[start : start + step])
            with _told_by_video(start, len(chosen)):
                # Checked before a bad one hides behind others.
                scores += checked(self.reward.score(part), part, self.traits.range)
        return [self._reduced(scores[i : i + len(chosen)]) for i in range(0, len(scores), len(chosen))]

    def _reduced(self, scores: Sequence[float | None]) -> float | None:
        known = [score for score in scores if score is not None]
        if not known:
            return None
        low, high = min(known), max(known)
        if self.reduce == "last":
            return known[-1]
        if self.reduce == "mean":
            return min(max(math.fsum(known) / len(known), low), high)  # rounding must not leave the reward's range
        return low if (self.reduce == "worst") == self.traits.higher_is_better else high


@contextmanager
def _told_by_video(start: int, frames: int) -> Iterator[None]:
    """Errors inside name a row of the frames from ``start`` on. Whoever called knows videos, of ``frames`` each."""
    try:
        yield
    except Exception as error:
        row = getattr(error, "row", 0)
        with suppress(AttributeError):  # if it cannot be set, the error itself is still worth more
            error.row = (start + (row if isinstance(row, int) else 0)) // frames  # type: ignore[attr-defined]
        raise


def chosen_frames(frames: str | int, count: int) -> list[int]:
    """Places of the frames to be scored, of ``count``."""
    if isinstance(frames, int):
        places = np.linspace(0, count - 1, min(frames, count)).round()
        return [int(place) for place in places]
    return {"all": list(range(count)), "first": [0], "last": [count - 1]}[frames]


def _check_frames(frames: Any) -> None:
    """One of the names, or a number that leaves room for both ends."""
    whole = isinstance(frames, int) and not isinstance(frames, bool)
    if frames not in NAMED and not (whole and frames >= 2):
        raise InputError(
            f"frames: {frames!r} will not do; give {', '.join(NAMED)}, or how many frames, at least 2 (first and last)"
        )


def _image_reward(given: Any) -> Reward:
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise InputError(f"reward: {given!r} will not do; give the image reward as {{type: ..., params: {{...}}}}")
    for key in given:
        if key not in KEYS:
            raise InputError(
                f"reward: unknown key {key!r}.{suggestion(str(key), KEYS)} Valid: {', '.join(KEYS)}; "
                "settings such as `device` belong to the entry of `frames` itself"
            )
    params = given.get("params")
    if params is not None and not isinstance(params, Mapping):
        raise InputError(f"reward.params: {params!r} will not do; give the arguments by name, {{argument: value}}")
    reward = build_reward(RewardConfig(type=given["type"], name="frame", params=dict(params or {})), "reward")
    if traits_of(reward).media != "image":
        raise InputError(f"reward.type: {given['type']!r} scores videos; use it by itself, without `frames`")
    return reward
