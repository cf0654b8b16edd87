"""Whether an object of a video moves as its prompt asks: a detector finds it in every frame, rules judge its path.

A frame counts as found if exactly one object of the class and colour is in it. Places in frames between are
interpolated. With f the share of frames in which the objects were found, and c_i the criteria of paths.py,

    strict = 1 if f >= FOUND, at most MISSED frames in a row are missed, and every c_i is 1; otherwise 0
    dense  = f * (1 + 4 * product of all c_i) / 5;  f / 5 where too few frames are left for a path
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from marble_rl.rewards.builtin.detection import Detection, DetectorParams, DetectorReward
from marble_rl.rewards.builtin.motion_form import PAIRS, Thing, WantedMotion, wanted_motion
from marble_rl.rewards.builtin.paths import Criteria, judge_gap, judge_path
from marble_rl.rewards.core.base import NotedScore, RewardBatch, Scores, Traits
from marble_rl.types import Prompt

Boxes = npt.NDArray[np.float64]
FOUND = 0.8
"""Least share of frames in which an object must be found."""
MISSED = 2
"""Most frames in a row in which it may be missed."""
FEWEST = 4
"""Frames that a path needs."""
Distance = Annotated[float, Field(gt=0, le=1)]


class Trajectory(DetectorReward):
    """Whether the objects move as the prompt asks: direction, speed, falling, bouncing, stopping, meeting, parting.

    It applies to prompts with `motion` in their metadata. Further parameters are those of the detector.
    """

    class Params(DetectorParams):
        credit: Literal["strict", "dense"] = "strict"
        """`strict`: 1 if everything is right, else 0. `dense`: from 0 to 1, how near it is."""
        slow: Distance = 0.2
        """How far something slow moves in the whole video, in longer sides of the picture."""
        fast: Distance = 0.55
        """How far something fast moves."""

    params: Params
    traits = Traits(range=(0, 1), deterministic=True, media="video")

    def applies_to(self, prompt: Prompt) -> bool:
        """To prompts with `motion`. Another form is refused, and so is an object that can never be found."""
        wanted = wanted_motion(prompt)
        if wanted is None:
            return False
        self.check_findable(prompt, wanted.include())
        return True

    def score(self, batch: RewardBatch) -> Scores:
        count, frames, height, width = batch.images.shape[:4]
        if frames < FEWEST:
            return [None] * count
        wanted = [motion for prompt in batch.prompts if (motion := wanted_motion(prompt)) is not None]
        pictures = batch.images.reshape(-1, height, width, 3)
        seen = self.objects_in(pictures, [motion.include() for motion in wanted for _ in range(frames)])
        clips = [seen[i : i + frames] for i in range(0, len(seen), frames)]
        return [self._judged(clip, motion, max(height, width)) for clip, motion in zip(clips, wanted, strict=True)]

    def _judged(self, seen: Sequence[list[Detection]], wanted: WantedMotion, side: int) -> NotedScore:
        boxes = [boxes_of(thing, seen) / side for thing in wanted.objects]
        missed = [np.isnan(box[:, 0]) for box in boxes]
        found = float(1 - np.mean(missed))
        note = f"found in {found:.0%} of the frames"
        if min(int((~gone).sum()) for gone in missed) < FEWEST:
            return NotedScore(0.0 if self.params.credit == "strict" else found / 5, note)
        criteria = self._criteria([_filled(box) for box in boxes], wanted)
        note += "".join(f", {name} {value:.2f}" for name, value in criteria.items() if value < 1)
        if self.params.credit == "dense":
            return NotedScore(found * (1 + 4 * math.prod(criteria.values())) / 5, note)
        kept = all(1 - gone.mean() >= FOUND and _longest(gone) <= MISSED for gone in missed)
        return NotedScore(float(kept and min(criteria.values()) == 1), note)

    def _criteria(self, boxes: Sequence[Boxes], wanted: WantedMotion) -> Criteria:
        centres = [(box[:, :2] + box[:, 2:]) / 2 for box in boxes]
        if wanted.kind in PAIRS:
            apart = np.abs(centres[0] - centres[1]) - sum(box[:, 2:] - box[:, :2] for box in boxes) / 2
            return judge_gap(apart.max(axis=1), wanted.kind)
        return judge_path(centres[0], wanted, {"slow": self.params.slow, "fast": self.params.fast})


def boxes_of(thing: Thing, seen: Sequence[list[Detection]]) -> Boxes:
    """Its box in each frame, [F, 4]; NaN where none or several such objects were found."""
    boxes = np.full((len(seen), 4), np.nan)
    for frame, objects in enumerate(seen):
        alike = [o for o in objects if o.name == thing.name and thing.color in (None, o.colour)]
        if len(alike) == 1:
            boxes[frame] = alike[0].box
    return boxes


def _filled(boxes: Boxes) -> Boxes:
    """With the frames between interpolated, and the first and last place kept before and after."""
    known = np.flatnonzero(~np.isnan(boxes[:, 0]))
    return np.stack([np.interp(np.arange(len(boxes)), known, column[known]) for column in boxes.T], axis=1)


def _longest(gone: npt.NDArray[np.bool_]) -> int:
    """Most frames in a row."""
    return max(len(run) for run in "".join("x" if frame else " " for frame in gone).split(" "))
