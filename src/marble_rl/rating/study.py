"""A study in its folder: which models are rated, on which prompts and how, and their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from marble_rl.errors import InputError
from marble_rl.storage import Record, Text

Ask = Literal["scales", "pairs"]
"""scales: each picture from 1 to 5; pairs: which of two pictures is better, or the same."""
Criterion = Literal["alignment", "quality"]
CRITERIA: tuple[Criterion, ...] = ("alignment", "quality")
"""The paper's: does the picture show what the prompt says, and how good does it look."""
HIGHEST = 5
"""Of a scale; the lowest is 1."""
PICTURE, VIDEO = ".png", ".webp"
"""Suffixes of a picture and of a video, as `save_sample` writes them."""


class RatedModel(BaseModel):
    """What is rated, under the name that results have. Raters never see the name."""

    model_config = ConfigDict(frozen=True)

    name: str
    target: str
    kind: Literal["run", "LoRA", "pipeline", "pictures"]
    step: int | None = None
    """Of a run: the checkpoint, also if the run goes on between two calls of `prepare`."""


class Sampling(BaseModel):
    """The same for all models. Picture j of prompt i starts from seed + i * images + j."""

    model_config = ConfigDict(frozen=True)

    seed: int
    steps: int
    solver: Literal["euler", "dpm2"]
    height: int | None
    width: int | None
    frames: int | None
    fps: int | None = None


class Study(Record):
    """study.json, which is written before the first picture."""

    kind: ClassVar[str] = "the plan of a rating study"
    fix: ClassVar[str] = "Give the --out of `marble rate prepare`."

    ask: Ask
    images: int
    """Pictures of each prompt and model"""
    sampling: Sampling
    models: list[RatedModel]
    prompts: list[Text]

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.models]


class StudyFolder:
    """Paths of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = path / "study.json"
        self.pictures = path / "pictures"
        self.raters = path / "raters.json"
        self.answers = path / "answers.jsonl"
        self.figures_csv = path / "results.csv"
        self.answers_csv = path / "answers.csv"

    def read(self) -> Study:
        if not self.plan.is_file():
            raise InputError(
                f"{self.path} is not a rating study: it has no {self.plan.name}. Make one with: marble rate prepare"
            )
        return Study.read(self.plan)

    def stem(self, model: str, prompt: int, image: int) -> Path:
        """A picture's file without its suffix."""
        return self.pictures / model / f"{prompt:04}-{image}"

    def picture(self, model: str, prompt: int, image: int) -> Path | None:
        """A picture's file; None if it is not there yet."""
        stem = self.stem(model, prompt, image)
        files = (stem.with_name(stem.name + suffix) for suffix in (PICTURE, VIDEO))
        return next((file for file in files if file.is_file()), None)

    def check_complete(self, study: Study) -> None:
        """Refuse a study of which pictures are missing, or whose pictures tell the models apart by their format."""
        places = [(i, j) for i in range(len(study.prompts)) for j in range(study.images)]
        files = [self.picture(name, *place) for name in study.names for place in places]
        if missing := files.count(None):
            raise InputError(
                f"{self.path}: {missing} of {len(files)} pictures are missing; run the same `marble rate prepare` again"
            )
        if len(suffixes := sorted({file.suffix for file in files if file is not None})) > 1:
            raise InputError(
                f"{self.path}: some models have pictures and others videos ({' and '.join(suffixes)} files), which "
                "tells them apart; prepare a study of models that make the same"
            )
