"""What a prompt asks for, as far as a reward can check it. Two prompts that ask for the same count as one.

`a dog and a cat` is `a cat and a dog`, also where they meet; `a dog left of a cat` is `a cat right of a dog`; a text to
be written is the same in any picture. Otherwise a held-out set would repeat training prompts in other words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from marble_rl.errors import InputError
from marble_rl.prompts.wanted import wanted_text
from marble_rl.types import Prompt

MIRRORED = {"right of": "left of", "below": "above"}


def meaning(text: str, metadata: Mapping[str, Any]) -> str:
    """A key that is equal for prompts that ask for the same."""
    if metadata.get("include"):
        try:
            return _objects(metadata["include"])
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise InputError(
                f"the prompt {text[:80]!r}: its `include` is not in GenEval's form, see docs/rewards/geneval.md"
            ) from None
    motion = metadata.get("motion")
    if isinstance(motion, Mapping) and isinstance(motion.get("objects"), list):
        objects = sorted(json.dumps(thing, sort_keys=True) for thing in motion["objects"])
        return "motion " + json.dumps({**motion, "objects": objects}, sort_keys=True)
    wanted = wanted_text(Prompt(0, text, "", metadata))
    return f"text {_plain(wanted)}" if wanted else f"prompt {_plain(text)}"


def asked_for(text: str, metadata: Mapping[str, Any]) -> set[str]:
    """The words of a prompt, and what they mean: the same may be wanted by a source that cannot check it."""
    try:
        return {_plain(text), meaning(text, metadata)}
    except InputError:  # of GenEval's form, which does not matter to a run without that reward
        return {_plain(text)}


def _objects(include: Sequence[Mapping[str, Any]]) -> str:
    """GenEval's list of objects and their places, in an order that does not depend on who is named first."""
    objects = [[entry["class"], entry["count"], entry.get("color", "")] for entry in include]
    relations = []
    for entry, thing in zip(include, objects, strict=True):
        if "position" in entry:
            relation, other = entry["position"]
            pair = [thing, objects[other]]
            mirrored = relation in MIRRORED
            relations.append([MIRRORED.get(relation, relation), *(reversed(pair) if mirrored else pair)])
    return "objects " + json.dumps([sorted(objects), sorted(relations)])


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
