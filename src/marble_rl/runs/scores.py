"""The record of an evaluation, `scores.json`: every image's scores under each of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, NonNegativeInt, model_validator

from marble_rl.intervals import Interval
from marble_rl.section import check_path
from marble_rl.storage import Record, Text

SCORES = "scores.json"
GRID = "grid"
"""File beside it with some of the pictures; .png, or .webp where they are videos."""
IMAGES = "images"
"""Folder beside it, with the pictures that were kept."""


@dataclass(frozen=True)
class ImageScores:
    prompt: Text
    source: str
    index: int
    """Of the prompt."""
    image: int
    """Of the images of this prompt."""
    scores: dict[str, float | None]
    """By reward; None where it does not apply."""


@dataclass(frozen=True)
class WeightsScores:
    means: dict[str, float]
    """By reward, over the images that it applies to."""
    images: list[ImageScores]


@dataclass(frozen=True)
class KeptPicture:
    row: NonNegativeInt
    """Its place in the list of images under each of the weights."""
    files: dict[str, Annotated[str, AfterValidator(check_path)]]
    """By weights."""
    notes: dict[str, dict[str, Text]] = field(default_factory=dict)
    """By weights, then by reward: what it noted on the picture, such as the text that it read."""


class Scores(Record):
    """Scores of one or several sets of weights on the same prompts and seeds."""

    kind: ClassVar[str] = "an evaluation"
    fix: ClassVar[str] = "Run marble evaluate again, or delete the file"

    step: int | None
    held_out_rewards: list[str]
    """Evaluation-only rewards: never trained on."""
    differences: dict[str, Interval]
    """By reward, the last weights against the first. A reward with scores of fewer than two prompts under both is left
    out, and where there is only one set of weights all are."""
    pictures: list[KeptPicture] = Field(default_factory=list)
    """Evaluations of older versions kept none."""
    weights: dict[str, WeightsScores]
    """In the order asked for."""
    made_with: dict[str, Any] = Field(default_factory=dict)
    """What the images follow from beside weights and prompts: seed, sampling steps, size. Evaluations of older versions
    do not say."""

    @model_validator(mode="after")
    def _same_images(self) -> Scores:
        counts = {len(scores.images) for scores in self.weights.values()}
        if len(counts) != 1 or 0 in counts:
            raise ValueError("expected the same number of images, at least one, under each of the weights")
        if any(
            picture.row >= max(counts) or not picture.files.keys() <= self.weights.keys() for picture in self.pictures
        ):
            raise ValueError("a picture is of no image in the list")
        return self

    @property
    def before(self) -> str:
        return next(iter(self.weights))

    @property
    def after(self) -> str:
        return list(self.weights)[-1]

    @property
    def images(self) -> list[ImageScores]:
        """Under the first weights; prompts are the same under all."""
        return self.weights[self.before].images

    @property
    def prompts(self) -> int:
        return len({(image.source, image.index) for image in self.images})

    @property
    def keeps_every_prompt(self) -> bool:
        """Whether there is a picture of each prompt (`marble evaluate --save-images`)."""
        return len(self.pictures) >= self.prompts

    @property
    def rewards(self) -> list[str]:
        """Those with a score under any of the weights: a reward may not apply to any image of one."""
        known = {name for scores in self.weights.values() for name in scores.means}
        return [name for name in self.images[0].scores if name in known]
