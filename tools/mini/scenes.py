"""The world of the mini pipeline: what its pictures can show, and how they are described.

Three prompt sources, so that specialist samples really occur:

    text          a blue sign that says "K7"                            an OCR target
    composition   two red marbles / a green star above a blue block     GenEval's metadata: what to find in the picture
    general       a yellow cone in the snow, at night                   no target at all: only preference

Everything is drawn from a `random.Random`; the same seed gives the same scenes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from marble_rl.mini.shapes import PAINT, SHAPES

COLOURS = tuple(PAINT)
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
RELATIONS = ("left of", "right of", "above", "below")
PLACES = {"on a table": "table", "in the snow": "snow", "on the sand": "sand", "on grey stone": "stone", "": "plain"}
LIGHTS = {"": "day", "at night": "night", "at sunset": "sunset", "in fog": "fog"}
GLYPHS = "ABCDEFGHJKLMNPRSTUVWXYZ23456789"
"""Without I, O, Q, 0 and 1, which are hard to distinguish at this size."""
SOURCES = ("text", "composition", "general")


@dataclass(frozen=True)
class Item:
    """One object. Position of its centre and radius in units of the picture's side."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float
    floor: float | None = None
    """Height at which its shadow falls; None: at its foot."""


@dataclass(frozen=True)
class Sign:
    """A board with letters on it."""

    text: str
    colour: str
    x: float = 0.5
    y: float = 0.46
    """Centre of the board."""
    scale: float = 1.0
    """1: as wide as fits into the picture."""


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn, with its caption."""

    caption: str
    source: str
    items: tuple[Item, ...] = ()
    sign: Sign | None = None
    place: str = "plain"
    light: str = "day"
    horizon: float = 0.5
    """Height at which the ground's upper colour has half turned into the lower one."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What a reward needs to know: `target` (text) or GenEval's `tag`, `include` and `exclude` (composition)."""


def draw_scene(source: str, dice: random.Random) -> Scene:
    """A random scene of one source."""
    return {"text": _text, "composition": _composition, "general": _general}[source](dice)


def _text(dice: random.Random) -> Scene:
    letters = "".join(dice.choice(GLYPHS) for _ in range(dice.choice((2, 2, 3))))
    colour = dice.choice(COLOURS)
    caption = f'a {colour} sign that says "{letters}"'
    return Scene(caption, "text", sign=Sign(letters, colour), metadata={"target": letters})


def _composition(dice: random.Random) -> Scene:
    """One of GenEval's six tasks."""
    task = dice.choice(("single_object", "two_object", "counting", "colors", "position", "color_attr"))
    return {
        "single_object": _one_kind,
        "colors": _one_kind,
        "counting": _one_kind,
        "two_object": _two_kinds,
        "position": _two_kinds,
        "color_attr": _two_kinds,
    }[task](task, dice)


def _one_kind(task: str, dice: random.Random) -> Scene:
    """`a star`, `a red star`, or `three red stars`."""
    shape, colour = dice.choice(SHAPES), dice.choice(COLOURS)
    count = dice.choice((2, 3, 4)) if task == "counting" else 1
    wanted: dict[str, Any] = {"class": shape, "count": count}
    if task == "single_object":
        caption = f"a {shape}"
    else:
        wanted["color"] = colour
        caption = f"a {colour} {shape}" if count == 1 else f"{NUMBERS[count]} {colour} {shape}s"
    items = tuple(Item(shape, colour, x, y, r) for x, y, r in arrange(count, dice))
    return Scene(caption, "composition", items, metadata=_exactly(task, [wanted]))


def _two_kinds(task: str, dice: random.Random) -> Scene:
    """`a star and a block`, with colours, or one beside the other."""
    first, second = dice.sample(SHAPES, 2)
    colour, other = dice.sample(COLOURS, 2)
    relation = dice.choice(RELATIONS)
    (x1, y1), (x2, y2) = _beside(relation, dice)
    radius = dice.uniform(0.14, 0.18)
    include: list[dict[str, Any]] = [{"class": first, "count": 1}, {"class": second, "count": 1}]
    if task == "two_object":
        caption = f"a {first} and a {second}"
    else:
        caption = f"a {colour} {first} and a {other} {second}"
        include[0]["color"], include[1]["color"] = colour, other
    if task == "position":
        caption = f"a {colour} {first} {relation} a {other} {second}"
        # GenEval names the object that stays put first; the other one's position refers to it by its place in the list.
        include = [include[1], {**include[0], "position": [relation, 0]}]
    items = (Item(first, colour, x1, y1, radius), Item(second, other, x2, y2, radius))
    return Scene(caption, "composition", items, metadata=_exactly(task, include))


def _exactly(task: str, include: list[dict[str, Any]]) -> dict[str, Any]:
    """GenEval's metadata for what is wanted, and no more of it."""
    exclude = [{"class": wanted["class"], "count": wanted["count"] + 1} for wanted in include]
    return {"tag": task, "include": include, "exclude": exclude}


def _general(dice: random.Random) -> Scene:
    count = dice.choice((1, 1, 2, 3))
    shape, colour = dice.choice(SHAPES), dice.choice(COLOURS)
    place, light = dice.choice(list(PLACES)), dice.choice(list(LIGHTS))
    things = f"a {colour} {shape}" if count == 1 else f"{NUMBERS[count]} {colour} {shape}s"
    caption = things + (f" {place}" if place else "") + (f", {light}" if light else "")
    items = tuple(Item(shape, colour, x, y, r) for x, y, r in arrange(count, dice))
    return Scene(caption, "general", items, place=PLACES[place], light=LIGHTS[light])


GRID = {
    1: [(0.5, 0.52)],
    2: [(0.29, 0.52), (0.71, 0.52)],
    3: [(0.28, 0.68), (0.72, 0.68), (0.5, 0.3)],
    4: [(0.29, 0.31), (0.71, 0.31), (0.29, 0.71), (0.71, 0.71)],
}


def arrange(count: int, dice: random.Random) -> list[tuple[float, float, float]]:
    """Centres and radii for ``count`` objects that do not touch."""
    low, high, shift = {1: (0.2, 0.3, 0.1), 2: (0.14, 0.18, 0.025), 3: (0.13, 0.17, 0.02), 4: (0.13, 0.17, 0.02)}[count]
    turned = count == 2 and dice.random() < 0.3
    places = []
    for x, y in GRID[count]:
        x, y = (y, x) if turned else (x, y)
        places.append((x + dice.uniform(-shift, shift), y + dice.uniform(-shift, shift), dice.uniform(low, high)))
    return places


def _beside(relation: str, dice: random.Random) -> tuple[tuple[float, float], tuple[float, float]]:
    """Centres of two objects of which the first is ``relation`` the second."""
    drift = dice.uniform(-0.08, 0.08)
    near, far = 0.28 + dice.uniform(-0.03, 0.02), 0.72 + dice.uniform(-0.02, 0.03)
    ends = {
        "left of": ((near, 0.5 + drift), (far, 0.5 - drift)),
        "above": ((0.5 + drift, near), (0.5 - drift, far)),
    }
    if relation in ends:
        return ends[relation]
    first, second = ends["left of" if relation == "right of" else "above"]
    return second, first
