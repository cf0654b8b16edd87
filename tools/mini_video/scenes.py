"""The world of the mini video pipeline: what its clips can show, and how they are described.

The pictures are those of tools/mini; here they move. Three prompt sources:

    motion    a red marble rolls slowly to the left / a blue star bounces      metadata `motion`: what moves, and how
    text      a blue sign that says "K7", the camera drifts left               an OCR target, in every frame
    general   two red stars drift in the snow, at night                        no target at all: only preference

Everything is drawn from a `random.Random`; the same seed gives the same clips.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marble_rl.mini.shapes import SHAPES
from tools.mini.scenes import COLOURS, LIGHTS, NUMBERS, PLACES, Item, Scene, arrange, draw_scene

FRAMES = 13
"""Of every clip; Wan takes 4 k + 1."""
FPS = 6
SOURCES = ("motion", "text", "general")
KINDS = ("move", "stop", "fall", "bounce", "meet", "part")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
DISTANCES = {"slow": (0.18, 0.22), "fast": (0.5, 0.57)}
"""Least and most that an object moves in a whole clip, in sides of the picture."""
CAMERA = ("drifts left", "drifts right", "drifts up", "drifts down", "zooms in", "zooms out")
VERBS = ("drift", "sway", "bob")
TIMES = tuple(frame / (FRAMES - 1) for frame in range(FRAMES))
"""From 0 to 1, of each frame."""
CONTACT = 0.85
"""Time at which two objects that meet have met."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Clip:
    """A clip before it is drawn, with its caption."""

    caption: str
    source: str
    scenes: tuple[Scene, ...]
    """One for each frame."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What a reward needs to know: `motion` or `target` (text)."""


def draw_clip(source: str, dice: random.Random) -> Clip:
    """A random clip of one source."""
    return {"motion": _motion, "text": _text, "general": _general}[source](dice)


def _motion(dice: random.Random) -> Clip:
    kind = dice.choice(KINDS)
    motion: dict[str, Any] = {"kind": kind}
    if kind in ("meet", "part"):
        shapes, colours = dice.sample(SHAPES, 2), dice.sample(COLOURS, 2)
    else:
        shapes, colours = [dice.choice(SHAPES)], [dice.choice(COLOURS)]
    motion["objects"] = [{"class": s, "color": c} for s, c in zip(shapes, colours, strict=True)]
    if kind in ("move", "stop"):
        motion |= {"direction": dice.choice(list(DIRECTIONS)), "speed": dice.choice(list(DISTANCES))}
    if kind == "bounce":
        sideways = dice.choice((None, "left", "right"))
        motion |= {"direction": sideways} if sideways else {}
    return clip_of(motion, dice)


def clip_of(motion: Mapping[str, Any], dice: random.Random) -> Clip:
    """A clip of the source `motion` that shows what its metadata asks for."""
    objects = motion["objects"]
    if len(objects) == 2:
        paths = _pair(motion["kind"], dice)
    else:
        radius = dice.uniform(0.16, 0.19)
        paths = [(_path(motion, radius, dice), radius)]
    floor = None
    if motion["kind"] in ("fall", "bounce"):
        (path, radius), *_ = paths
        floor = max(y for _, y in path) + 0.92 * radius
    scenes = tuple(
        Scene(
            caption_of(motion),
            "motion",
            tuple(
                Item(thing["class"], thing["color"], *path[frame], radius, floor)
                for thing, (path, radius) in zip(objects, paths, strict=True)
            ),
        )
        for frame in range(FRAMES)
    )
    return Clip(caption_of(motion), "motion", scenes, {"motion": dict(motion)})


def caption_of(motion: Mapping[str, Any]) -> str:
    """`a red marble rolls slowly to the left and stops`, `a red marble and a blue block meet`."""
    things = " and ".join(f"a {thing['color']} {thing['class']}" for thing in motion["objects"])
    kind, direction = motion["kind"], motion.get("direction", "")
    if kind in ("meet", "part"):
        return f"{things} {kind}"
    where = f" to the {direction}" if direction in ("left", "right") else f" {direction}" if direction else ""
    if kind in ("fall", "bounce"):
        return f"{things} {kind}s{where}"
    rolls = motion["objects"][0]["class"] == "marble" and direction in ("left", "right")
    speed = {"slow": "slowly", "fast": "fast"}[motion["speed"]]
    return f"{things} {'rolls' if rolls else 'moves'} {speed}{where}{' and stops' if kind == 'stop' else ''}"


def _path(motion: Mapping[str, Any], radius: float, dice: random.Random) -> list[Point]:
    """Centres of an object in each frame, never outside of the picture."""
    kind = motion["kind"]
    if kind == "bounce":
        return _bounce(motion.get("direction"), radius, dice)
    across, down = (0, 1) if kind == "fall" else DIRECTIONS[motion["direction"]]
    distance = dice.uniform(*DISTANCES["fast" if kind == "fall" else motion["speed"]])
    when: dict[str, Callable[[float], float]] = {
        "move": lambda time: time,
        "stop": lambda time: min(time, 0.5),  # as fast as a `move`, for half of the clip
        "fall": lambda time: time**2,
    }
    moved = [distance * when[kind](time) for time in TIMES]
    x = _start(across * moved[-1], radius, dice)
    y = _start(down * moved[-1], radius, dice)
    return [(x + across * far, y + down * far) for far in moved]


def _start(distance: float, radius: float, dice: random.Random) -> float:
    """Somewhere from which this distance stays inside."""
    room = radius + 0.02
    return dice.uniform(room + max(-distance, 0), 1 - room - max(distance, 0))


def _bounce(direction: str | None, radius: float, dice: random.Random) -> list[Point]:
    """Down, faster and faster, and up again, not quite as high."""
    height = dice.uniform(0.45, 0.5)
    low = dice.uniform(0.05 + radius + height, 0.96 - radius)
    hit = dice.choice((5, 6)) / (FRAMES - 1)
    again = height * dice.uniform(0.75, 0.9)
    sideways = 0.0 if direction is None else DIRECTIONS[direction][0] * dice.uniform(0.3, 0.4)
    x = _start(sideways, radius, dice)
    above = [
        height * (1 - (time / hit) ** 2) if time < hit else again * (1 - ((1 - time) / (1 - hit)) ** 2)
        for time in TIMES
    ]
    return [(x + sideways * time, low - up) for time, up in zip(TIMES, above, strict=True)]


def _pair(kind: str, dice: random.Random) -> list[tuple[list[Point], float]]:
    """Two objects on one line, side by side or one above the other, that touch at the end (or at the beginning)."""
    radii = [dice.uniform(0.155, 0.175) for _ in range(2)]
    far, near = dice.uniform(0.29, 0.31), sum(radii) / 2 + 0.005
    times = [min(time / CONTACT, 1) for time in TIMES]
    if kind == "part":
        times.reverse()
    middle, aside = dice.uniform(0.49, 0.51), dice.uniform(0.4, 0.6)
    sign, upright = dice.choice((-1, 1)), dice.random() < 0.3
    paths = []
    for side, radius in zip((sign, -sign), radii, strict=True):
        along = [middle + side * (far + (near - far) * time) for time in times]
        paths.append(([(aside, place) if upright else (place, aside) for place in along], radius))
    return paths


def _text(dice: random.Random) -> Clip:
    """A sign as in tools/mini, smaller, so that it stays in the picture while the camera moves."""
    still, camera = draw_scene("text", dice), dice.choice(CAMERA)
    assert still.sign is not None
    caption = f"{still.caption}, the camera {camera}"
    # What the camera leaves moves the other way.
    across, down = DIRECTIONS.get(camera.split()[1], (0, 0))
    growth = {"zooms in": 1, "zooms out": -1}.get(camera, 0)
    scale, x, y = dice.uniform(0.84, 0.88), 0.5 + dice.uniform(-0.02, 0.02), 0.46 + dice.uniform(-0.03, 0.03)
    scenes = []
    for time in TIMES:
        gone = time - 0.5
        sign = replace(
            still.sign, x=x - 0.16 * across * gone, y=y - 0.16 * down * gone, scale=scale * (1 + 0.3 * growth * gone)
        )
        scenes.append(replace(still, caption=caption, sign=sign, horizon=0.5 - 0.16 * down * gone))
    return Clip(caption, "text", tuple(scenes), dict(still.metadata))


def _general(dice: random.Random) -> Clip:
    count = dice.choice((1, 1, 2, 3))
    shape, colour, verb = dice.choice(SHAPES), dice.choice(COLOURS), dice.choice(VERBS)
    place, light = dice.choice(list(PLACES)), dice.choice(list(LIGHTS))
    things = f"a {colour} {shape} {verb}s" if count == 1 else f"{NUMBERS[count]} {colour} {shape}s {verb}"
    caption = things + (f" {place}" if place else "") + (f", {light}" if light else "")
    still = [Item(shape, colour, x, y, min(radius, 0.22)) for x, y, radius in arrange(count, dice)]
    moved = _swaying(verb, dice)
    scenes = tuple(
        Scene(
            caption,
            "general",
            tuple(replace(item, x=item.x + across, y=item.y + down) for item in still),
            place=PLACES[place],
            light=LIGHTS[light],
        )
        for across, down in moved
    )
    return Clip(caption, "general", scenes)


def _swaying(verb: str, dice: random.Random) -> Sequence[Point]:
    """Displacements of all objects in each frame, by up to 0.07."""
    if verb == "drift":
        across, down = dice.choice(list(DIRECTIONS.values()))
        return [(0.14 * across * (time - 0.5), 0.14 * down * (time - 0.5)) for time in TIMES]
    turn = dice.uniform(0, 2 * math.pi)
    waves = [0.07 * math.sin(2 * math.pi * time + turn) for time in TIMES]
    return [(wave, 0.0) if verb == "sway" else (0.0, wave) for wave in waves]
