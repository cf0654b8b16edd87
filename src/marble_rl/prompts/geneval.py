"""GenEval's prompts and their metadata, for its six tasks over COCO's 80 objects.

As in GenEval (Ghosh et al., 2023): `a photo of ...`, counts from two to four, ten colours, four relations, two objects
of different classes, two different colours, no coloured person. Unlike there, irregular nouns are inflected (`two
knives`, `a pair of scissors`); the metadata's class names are GenEval's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marble_rl.errors import InputError, require_name
from marble_rl.prompts.colours import COLOURS
from marble_rl.prompts.files import Row
from marble_rl.prompts.kinds import Kind, different, digits

_OBJECTS = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, handbag,
tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard,
tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse,
tv remote, computer keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors,
teddy bear, hair drier, toothbrush
"""
OBJECTS = tuple(" ".join(name.split()) for name in _OBJECTS.split(","))
"""GenEval's names: COCO's, but for the mouse, the remote and the keyboard."""
COLOURABLE = tuple(name for name in OBJECTS if name != "person")
COUNTS = {2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}
MEASURES = {"skis": "pair", "scissors": "pair", "broccoli": "head"}
"""Nouns that cannot be counted without another one."""
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
TRAINING_MIX = {"position": 7.0, "counting": 5.0, "color_attr": 3.0, "colors": 1.0, "two_object": 1.0}
"""That of flow_grpo's training set (dataset/merge_genevaltask.py)."""


def kinds(weights: Mapping[str, float] | None, where: str) -> dict[str, Kind]:
    """The tasks, by name."""
    weights = TRAINING_MIX if weights is None else weights
    for task in weights:
        require_name(task, TASKS, f"{where}.tasks")
    if not any(weights.values()):
        raise InputError(f"{where}.tasks: no task has a weight above 0; give one to at least one of {', '.join(TASKS)}")
    things, coloured, colours = len(OBJECTS), len(COLOURABLE), len(COLOURS)
    sizes_and_writers = {
        "single_object": (things, _single_object),
        "two_object": (things * (things - 1), _two_object),
        "counting": (things * len(COUNTS), _counting),
        "colors": (coloured * colours, _colors),
        "position": (things * (things - 1) * len(RELATIONS), _position),
        "color_attr": (coloured * (coloured - 1) * colours * (colours - 1), _color_attr),
    }
    return {task: Kind(weights.get(task, 0.0), size, write) for task, (size, write) in sizes_and_writers.items()}


def _single_object(number: int) -> Row:
    name = OBJECTS[number]
    return _photo("single_object", one(name), [_entry(name)])


def _two_object(number: int) -> Row:
    first, second = (OBJECTS[i] for i in different(digits(number, len(OBJECTS), len(OBJECTS) - 1)))
    return _photo("two_object", f"{one(first)} and {one(second)}", [_entry(first), _entry(second)])


def _counting(number: int) -> Row:
    thing, extra = digits(number, len(OBJECTS), len(COUNTS))
    name, count = OBJECTS[thing], list(COUNTS)[extra]
    # One more than asked for is as wrong as one fewer.
    return _photo(
        "counting", several(count, name), [_entry(name, count=count)], exclude=[_entry(name, count=count + 1)]
    )


def _colors(number: int) -> Row:
    thing, shade = digits(number, len(COLOURABLE), len(COLOURS))
    name, colour = COLOURABLE[thing], COLOURS[shade]
    return _photo("colors", one(name, colour), [_entry(name, color=colour)])


def _position(number: int) -> Row:
    *pair, way = digits(number, len(OBJECTS), len(OBJECTS) - 1, len(RELATIONS))
    first, second = (OBJECTS[i] for i in different(pair))
    relation = RELATIONS[way]
    # GenEval lists the object that stays put first; the other's position refers to it by its place in the list.
    include = [_entry(second), _entry(first, position=[relation, 0])]
    return _photo("position", f"{one(first)} {relation} {one(second)}", include)


def _color_attr(number: int) -> Row:
    sizes = (len(COLOURABLE), len(COLOURABLE) - 1, len(COLOURS), len(COLOURS) - 1)
    thing, other, shade, tint = digits(number, *sizes)
    names = [COLOURABLE[i] for i in different([thing, other])]
    colours = [COLOURS[i] for i in different([shade, tint])]
    pairs = list(zip(names, colours, strict=True))
    return _photo(
        "color_attr", " and ".join(one(*pair) for pair in pairs), [_entry(name, color=colour) for name, colour in pairs]
    )


def one(name: str, colour: str = "") -> str:
    """`an apple`, `a red apple`, `a pair of red scissors`."""
    noun = f"{colour} {name}".strip()
    noun = f"{MEASURES[name]} of {noun}" if name in MEASURES else noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def several(count: int, name: str) -> str:
    """`two apples`, `three pairs of scissors`."""
    if name in MEASURES:
        return f"{COUNTS[count]} {MEASURES[name]}s of {name}"
    ending = "es" if name.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{COUNTS[count]} {PLURALS.get(name, name + ending)}"


def _entry(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def _photo(task: str, things: str, include: list[dict[str, Any]], **more: Any) -> Row:
    return Row(f"a photo of {things}", {"tag": task, "include": include, **more})
