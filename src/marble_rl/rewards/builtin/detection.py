"""Rewards that rest on objects in a picture: what a detector is, and how a reward comes by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, create_model

from marble_rl.errors import InputError
from marble_rl.plugins import import_path
from marble_rl.rewards.core.base import Images, RewardBase
from marble_rl.rewards.core.registry import construct
from marble_rl.section import Section, shown
from marble_rl.types import Prompt

Mask = npt.NDArray[np.bool_]
DETECTORS = {
    "mini": "marble_rl.rewards.builtin.mini_detector:MiniDetector",
    "photo": "marble_rl.rewards.builtin.photo_detector:PhotoDetector",
}


@dataclass(frozen=True)
class Detection:
    """One object in a picture."""

    name: str
    colour: str
    """Empty until a prompt asks for it"""
    box: tuple[float, float, float, float]
    """left, top, right, bottom"""
    confidence: float
    mask: Mask | None = field(default=None, compare=False, repr=False)
    """[bottom - top, right - left]: the object's own pixels inside its box, if the detector knows them"""


class Detector(Protocol):
    """Finds objects. It is constructed with the parameters that are not the reward's own, which it declares by a class
    `Params` as rewards do; weights are read in `load`."""

    def load(self, device: torch.device) -> None: ...

    def detect(self, images: Images) -> list[list[Detection]]:
        """Objects of each picture, in any order."""


@runtime_checkable
class Attentive(Protocol):
    """A detector that looks again once it knows what the prompts ask for."""

    def attend(
        self, images: Images, objects: Sequence[list[Detection]], wanted: Sequence[Mapping[str, Any]]
    ) -> list[list[Detection]]:
        """The objects that `detect` returned, revised for each prompt's metadata."""


@runtime_checkable
class Limited(Protocol):
    """A detector that knows without its weights what it can find."""

    def check_findable(self, metadata: Mapping[str, Any]) -> None:
        """Raise InputError if the metadata names an object or a colour that can never be found; its message continues
        the words `the prompt ...`."""


class _AnySettings(Section):
    """For a detector that does not declare its parameters; its constructor's signature checks them."""

    model_config = ConfigDict(extra="allow")


@cache
def _side_by_side(first: type[Section], second: type[Section]) -> type[Section]:
    """A section with the fields of both. Making a pydantic model takes milliseconds, so each is made once."""
    return create_model("Params", __base__=(first, second))


class DetectorParams(Section):
    """What all rewards with a detector take."""

    detector: str = "mini"
    """`mini`, `photo`, or the import path of a class with `load` and `detect`."""


class DetectorReward(RewardBase):
    """A reward with a detector. Parameters that it does not declare itself are the detector's."""

    Params: type[DetectorParams] = DetectorParams

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        settings = {name: value for name, value in params.items() if name not in self.Params.model_fields}
        self.detector: Detector = construct(detector_class(self.params.detector), settings, "detector")

    @classmethod
    def params_model(cls, params: Mapping[str, Any]) -> type[Section]:
        """Its own fields and those of the detector, side by side."""
        detector = params.get("detector", cls.Params.model_fields["detector"].default)
        own = getattr(detector_class(detector), "Params", None)
        return _side_by_side(cls.Params, own or _AnySettings)

    def load(self, device: torch.device) -> None:
        self.detector.load(device)

    def check_findable(self, prompt: Prompt, wanted: Mapping[str, Any]) -> None:
        """Refuse an object that the detector can never find, if it says so: every picture would score 0."""
        if isinstance(self.detector, Limited):
            try:
                self.detector.check_findable(wanted)
            except InputError as error:
                raise InputError(f"the prompt {prompt.text!r} (source {prompt.source!r}) {error}") from None

    def objects_in(self, images: Images, wanted: Sequence[Mapping[str, Any]]) -> list[list[Detection]]:
        """Objects of each picture, of which ``wanted`` (GenEval's metadata) says what is asked for."""
        objects = self.detector.detect(images)
        if isinstance(self.detector, Attentive):
            objects = self.detector.attend(images, objects, wanted)
        return objects


def detector_class(name: Any) -> Any:
    """The class that `detector` names."""
    path = DETECTORS.get(name, name) if isinstance(name, str) else ""
    if ":" not in path:
        raise InputError(
            f"detector: expected {', '.join(DETECTORS)} or an import path `package.module:Class`, got {shown(name)}"
        )
    return import_path(path, "detector")
