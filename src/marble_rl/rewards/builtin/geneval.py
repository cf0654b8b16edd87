"""GenEval: whether a picture shows what its prompt asks for, object by object.

A detector says what is in the picture; the rules compare that with the prompt's metadata, in GenEval's form:

    {"tag": "position", "include": [{"class": "block", "count": 1},
                                    {"class": "star", "count": 1, "color": "red", "position": ["left of", 0]}],
     "exclude": [{"class": "marble", "count": 1}]}

`include` wants at least `count` objects of a class, of a colour, beside the objects of the entry with that number.
`exclude` forbids `count` or more.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from marble_rl.errors import InputError, suggestion
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Traits
from marble_rl.types import Prompt

Mask = npt.NDArray[np.bool_]
CLOSE = 0.1
"""Centres nearer than this share of the two objects' sizes are on the same line."""
SIDEWAYS = 0.5
"""An object is left of another if more than this share of their distance, beyond what is close, points there."""
DETECTORS = {
    "mini": "marble_rl.rewards.builtin.mini_detector:MiniDetector",
    "photo": "marble_rl.rewards.builtin.detection:PhotoDetector",
}
SCORES = ("strict", "partial")


@dataclass(frozen=True)
class Detection:
    """One object in a picture."""

    name: str
    colour: str
    """Empty as long as nobody has asked for it"""
    box: tuple[float, float, float, float]
    """left, top, right, bottom"""
    confidence: float
    mask: Mask | None = field(default=None, compare=False, repr=False)
    """[bottom - top, right - left]: the object's own pixels inside its box, if the detector knows them"""


class Detector(Protocol):
    """Finds objects. It is constructed with the params that are not the reward's own; weights are read in `load`."""

    def load(self, device: torch.device) -> None: ...

    def detect(self, images: Images) -> list[list[Detection]]:
        """Objects of each picture, in any order."""


@runtime_checkable
class Attentive(Protocol):
    """A detector that looks again once it knows what the prompts ask for."""

    def attend(
        self, images: Images, found: Sequence[list[Detection]], wanted: Sequence[Mapping[str, Any]]
    ) -> list[list[Detection]]:
        """What `detect` found, in view of each prompt's metadata."""


@runtime_checkable
class Limited(Protocol):
    """A detector that knows without its weights what it can find."""

    def check_findable(self, metadata: Mapping[str, Any]) -> None:
        """Raise InputError if the metadata names an object or a colour that can never be found; what it says follows
        the words `the prompt ...`."""


class GenEval(RewardBase):
    """Whether the objects, counts, colours and positions that the prompt asks for are all in the picture: 0 or 1.

    ``score: partial`` gives the share of requirements met before the first that is not. ``detector`` is `mini`,
    `photo` or an import path; further params are the detector's own.
    """

    traits = Traits(range=(0, 1), deterministic=True)

    def __init__(self, detector: str = "mini", score: str = "strict", **settings: Any) -> None:
        if score not in SCORES:
            raise InputError(f"score: unknown {score!r}; use one of {', '.join(SCORES)}")
        self.detector = _build_detector(detector, settings)
        self.strict = score == "strict"

    def applies_to(self, prompt: Prompt) -> bool:
        """To prompts that include something. Metadata in another form than GenEval's is refused, and so is what the
        detector can never find, if it says so: every picture would score 0."""
        if not prompt.metadata.get("include"):
            return False
        check_form(prompt)
        if isinstance(self.detector, Limited):
            try:
                self.detector.check_findable(prompt.metadata)
            except InputError as error:
                raise InputError(f"the prompt {prompt.text!r} (source {prompt.source!r}) {error}") from None
        return True

    def load(self, device: torch.device) -> None:
        self.detector.load(device)

    def score(self, batch: RewardBatch) -> Sequence[float]:
        found = self.detector.detect(batch.images)
        if isinstance(self.detector, Attentive):
            found = self.detector.attend(batch.images, found, [prompt.metadata for prompt in batch.prompts])
        shares = [share_met(objects, prompt.metadata) for objects, prompt in zip(found, batch.prompts, strict=True)]
        return [float(share == 1) for share in shares] if self.strict else shares


def _build_detector(detector: str, settings: Mapping[str, Any]) -> Detector:
    path = DETECTORS.get(detector, detector)
    if ":" not in path:
        raise InputError(
            f"detector: unknown {detector!r}; use {', '.join(DETECTORS)} or an import path `package.module:Class`"
        )
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"detector: cannot import {path!r} ({error}); mend the path") from error
    arguments = inspect.signature(kind).parameters
    valid = [name for name, p in arguments.items() if p.kind is not p.VAR_KEYWORD]
    for key in settings:
        if key not in valid and len(valid) == len(arguments):
            raise InputError(
                f"unknown argument {key!r} for the detector {detector!r}.{suggestion(key, valid)} "
                f"Valid: {', '.join(['detector', 'score', *valid])}"
            )
    return cast(Detector, kind(**settings))


class Wanted(BaseModel):
    """An entry of `include`, or of `exclude`."""

    name: str = Field(alias="class", min_length=1)
    count: PositiveInt
    color: str | None = None
    position: tuple[Literal["left of", "right of", "above", "below"], NonNegativeInt] | None = None


FORM = TypeAdapter(list[Wanted])


def check_form(prompt: Prompt) -> None:
    """Raise InputError unless the prompt's metadata is in GenEval's form."""
    where = f"metadata of the prompt {prompt.text!r} (source {prompt.source!r})"
    for key in ("include", "exclude"):
        try:
            entries = FORM.validate_python(prompt.metadata.get(key, []))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, (key, *first["loc"])))
            raise InputError(
                f"{where}: {place}: found {first['input']!r}; {first['msg']}. See the form in docs/rewards/geneval.md"
            ) from None
        for number, entry in enumerate(entries):
            if entry.position is not None and entry.position[1] >= number:
                raise InputError(
                    f"{where}: {key}.{number}.position: {entry.position[1]} is no earlier entry; "
                    "name the number of one before it"
                )


def share_met(objects: Sequence[Detection], metadata: Mapping[str, Any]) -> float:
    """Share of the requirements met, counted up to the first that is not: nothing after a failure earns credit."""
    checks = 0
    passed = 0
    failed = False
    matched: list[list[Detection]] = []
    for wanted in metadata["include"]:
        chosen = standing_for(objects, wanted)
        results = [len(chosen) >= wanted["count"]]
        if "color" in wanted:
            results.append(results[0] and all(o.colour == wanted["color"] for o in chosen))
        if "position" in wanted:
            relation, other = wanted["position"]
            pairs = [(o, target) for o in chosen for target in matched[other]]
            results.append(bool(pairs) and all(relation in relations(o, target) for o, target in pairs))
        matched.append(chosen if all(results) else [])
        for result in results:
            checks += 1
            failed = failed or not result
            passed += not failed
    for banned in metadata.get("exclude", ()):
        checks += 1
        failed = failed or len(_of_class(objects, banned["class"])) >= banned["count"]
        passed += not failed
    return passed / checks


def standing_for(objects: Sequence[Detection], wanted: Mapping[str, Any]) -> list[Detection]:
    """The objects that an entry of `include` is checked on: the most certain of its class, up to its count."""
    return _of_class(objects, wanted["class"])[: wanted["count"]]


def _of_class(objects: Sequence[Detection], name: str) -> list[Detection]:
    """Most certain first."""
    return sorted((o for o in objects if o.name == name), key=lambda o: -o.confidence)


def relations(first: Detection, second: Detection) -> set[str]:
    """Where the first object lies, seen from the second: up to two of left of, right of, above, below."""
    raw, revised = [], []
    for low, high in ((0, 2), (1, 3)):
        distance = (first.box[low] + first.box[high] - second.box[low] - second.box[high]) / 2
        sizes = first.box[high] - first.box[low] + second.box[high] - second.box[low]
        raw.append(distance)
        revised.append(max(abs(distance) - CLOSE * sizes, 0.0) * (1 if distance > 0 else -1))
    length = math.hypot(*raw)
    if length == 0:
        return set()
    across, down = revised[0] / length, revised[1] / length
    named = {"left of": -across, "right of": across, "above": -down, "below": down}
    return {relation for relation, share in named.items() if share > SIDEWAYS}
