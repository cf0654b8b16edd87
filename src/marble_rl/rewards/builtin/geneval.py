"""GenEval: whether a picture shows what its prompt asks for, object by object.

A detector says what is in the picture; the rules compare that with the prompt's metadata, in GenEval's form:

    {"tag": "position", "include": [{"class": "block", "count": 1},
                                    {"class": "star", "count": 1, "color": "red", "position": ["left of", 0]}],
     "exclude": [{"class": "marble", "count": 1}]}

`include` wants at least `count` objects of a class, of a colour, beside the objects of the entry with that number.
`exclude` forbids `count` or more.

What a picture earns is GenEval's own 0 or 1 (`strict`), or one of two rewards that tell near misses apart: `partial`
is ours, `dense` is the one that flow_grpo and DiffusionNFT train on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from marble_rl.errors import InputError
from marble_rl.rewards.builtin.detection import Detection, DetectorParams, DetectorReward
from marble_rl.rewards.core.base import RewardBatch, Traits
from marble_rl.section import shown
from marble_rl.types import Prompt

CLOSE = 0.1
"""Centres nearer than this share of the two objects' sizes are on the same line."""
SIDEWAYS = 0.5
"""An object is left of another if more than this share of their distance, beyond what is close, points there."""


class GenEval(DetectorReward):
    """Whether the objects, counts, colours and positions that the prompt asks for are in the picture.

    Further parameters are those of the detector.
    """

    class Params(DetectorParams):
        credit: Literal["strict", "partial", "dense"] = "strict"
        """`strict`: 1 if everything is right, else 0. `partial`: the share of requirements met before the first that is
        not. `dense`: the mean of what each requirement earns, as in DiffusionNFT's training; at most 1."""

    params: Params
    traits = Traits(range=(0, 1), deterministic=True)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        if self.params.credit == "dense":  # three objects where one is wanted earn -1
            self.traits = Traits(range=(-math.inf, 1), deterministic=True)

    def applies_to(self, prompt: Prompt) -> bool:
        """To prompts with `include`. Metadata in another form than GenEval's is refused. So is an object that the
        detector can never find."""
        if not prompt.metadata.get("include"):
            return False
        check_form(prompt)
        self.check_findable(prompt, prompt.metadata)
        return True

    def score(self, batch: RewardBatch) -> Sequence[float]:
        wanted = [prompt.metadata for prompt in batch.prompts]
        objects = self.objects_in(batch.images, wanted)
        credit = CREDITS[self.params.credit]
        return [credit(seen, metadata) for seen, metadata in zip(objects, wanted, strict=True)]


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
                f"{where}: {place}: got {shown(first['input'])}; {first['msg'].lower()}. "
                "See the form in docs/rewards/geneval.md"
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


def all_met(objects: Sequence[Detection], metadata: Mapping[str, Any]) -> float:
    """1 if every requirement is met, else 0: GenEval's own score."""
    return float(share_met(objects, metadata) == 1)


def dense_credit(objects: Sequence[Detection], metadata: Mapping[str, Any]) -> float:
    """Mean of what the requirements in `include` earn: what flow_grpo and DiffusionNFT train on, to the letter
    (`evaluate_reward` in their gen_eval.py).

    n objects where c are wanted earn 1 - |n - c| / c, below 0 for more than 2c. Where it is right, the
    number of those with the right colour earns by the same rule; where all have it, or none is asked for, a right
    position earns 1. Three oddities of theirs are kept, so that scores are the same: after a wrong number, colour and
    position together count as one 0, after a wrong colour position does not count; a wrong position adds a 0 and a 1
    (a 0 alone if the target failed); and `exclude` is not looked at, because too many objects cost enough.
    """
    earned: list[float] = []
    matched: list[list[Detection] | None] = []
    for wanted in metadata["include"]:
        found, count = _of_class(objects, wanted["class"]), wanted["count"]
        earned.append(_nearness(len(found), count))
        met = len(found) == count
        if not met and ("color" in wanted or "position" in wanted):
            earned.append(0.0)
        if met and "color" in wanted:
            coloured = sum(o.colour == wanted["color"] for o in found)
            earned.append(_nearness(coloured, count))
            met = coloured == count
        if met and "position" in wanted:
            relation, other = wanted["position"]
            targets = matched[other]
            met = targets is not None and all(relation in relations(o, target) for o in found for target in targets)
            earned += [1.0] if met else [0.0] if targets is None else [0.0, 1.0]
        matched.append(found if met else None)
    return sum(earned) / len(earned)


def _nearness(number: int, wanted: int) -> float:
    return 1 - abs(wanted - number) / wanted


CREDITS = {"strict": all_met, "partial": share_met, "dense": dense_credit}


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
