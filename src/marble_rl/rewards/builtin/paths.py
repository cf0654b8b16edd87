"""Whether the path of an object is the one that was asked for.

A path is a place in every frame, [F, 2], in sides of the picture. Each criterion is 1 if it is met, and falls to 0:

    direction   cosine between the displacement and the direction wanted
    speed       ratio of the distance to the one wanted
    shape       distance of the path from the best of a few ideal ones, with the displacement that fits best
    even        the largest step's share of the whole way: a jump, or frames that repeat, are no motion
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from marble_rl.rewards.builtin.motion_form import DIRECTIONS, WantedMotion

Path = npt.NDArray[np.float64]
Criteria = dict[str, float]
STRAIGHT = 0.93
"""Least cosine."""
RATIO = 1.35
"""Most by which a distance may differ from the one wanted."""
DISTANCE = 0.15
"""Least that something moves where no speed is wanted, in sides of the picture."""
FALL = 0.3
"""Least that something falls."""
TOUCHING = 0.08
"""Most between the boxes of two objects that touch. Boxes are whole pixels, and a dark edge may be outside."""
TURN = 0.06
"""A way back that is shorter is no turn but shaking."""
IDEALS = {
    "move": (1, (1.0,)),
    "stop": (1, (0.4, 0.5, 0.6)),
    "fall": (2, (0.7, 0.85, 1.0)),
    "meet": (1, (0.5, 0.7, 0.85, 1.0)),
}
"""p and some e: the share of the way at each time t from 0 to 1 is min(t / e, 1)^p."""
SHAPE = {"move": 0.1, "stop": 0.08, "fall": 0.05, "meet": 0.1}
"""Most root mean squared distance from the ideal, as a share of the displacement. Constant speed is 0.07 from a fall
and 0.12 from a stop; a stop is 0.14 from constant speed."""
BLUR = 0.005
"""The same in sides of the picture, in addition: a third of a pixel of 64, which places are uncertain by."""
STEP = {"move": 0.2, "stop": 0.32, "fall": 0.3, "bounce": 0.3, "meet": 0.26}
"""Largest step's share of the way, about twice that of 13 ideal frames; more for the distance between two boxes of
whole pixels."""


def graded(value: float, good: float, bad: float) -> float:
    """1 from ``good`` on, 0 from ``bad`` on, a line between."""
    return float(np.clip((value - bad) / (good - bad), 0, 1))


def judge_path(path: Path, wanted: WantedMotion, distances: Mapping[str, float]) -> Criteria:
    """The criteria of one object's path. ``distances``: of `slow` and `fast` over a whole clip."""
    if wanted.kind == "bounce":
        return _bounce(path, wanted.direction)
    moved, shape = _fitted(path, wanted.kind)
    length = float(np.linalg.norm(moved))
    direction = DIRECTIONS[wanted.direction or "down"]
    if wanted.speed is not None:
        ratio = length / (distances[wanted.speed] * (0.5 if wanted.kind == "stop" else 1))
        speed = min(1.0, RATIO * min(ratio, 1 / max(ratio, 1e-9)))
    else:
        speed = graded(length, FALL if wanted.kind == "fall" else DISTANCE, 0)
    return {
        "direction": graded(float(moved @ direction) / max(length, 1e-9), STRAIGHT, 0),
        "speed": speed,
        "shape": shape,
        "even": _even(path, STEP[wanted.kind]),
    }


def judge_gap(gap: Path, kind: str) -> Criteria:
    """The criteria of the distance [F] between two objects that `meet` or `part`."""
    closing = gap[::-1] if kind == "part" else gap
    near = float(closing[-2:].mean())
    _, shape = _fitted(closing[:, None], "meet")
    return {
        "touching": graded(near, TOUCHING, 4 * TOUCHING),
        "speed": graded(float(closing[:2].mean()) - near, DISTANCE, 0),
        "shape": shape,
        "even": _even(closing[:, None], STEP["meet"]),
    }


def _fitted(path: Path, kind: str) -> tuple[Path, float]:
    """Displacement [2] of the ideal path that is nearest, and the criterion `shape`."""
    time = np.linspace(0, 1, len(path))
    centred = path - path.mean(axis=0)
    fits = []
    power, ends = IDEALS[kind]
    for end in ends:
        profile = np.minimum(time / end, 1) ** power
        profile -= profile.mean()
        moved = profile @ centred / (profile @ profile)
        fits.append((float(np.sqrt(np.square(centred - profile[:, None] * moved).sum(axis=1).mean())), moved))
    away, moved = min(fits, key=lambda fit: fit[0])
    most = SHAPE[kind] * float(np.linalg.norm(moved)) + BLUR
    return moved, graded(away, most, 3 * most)


def _even(path: Path, most: float) -> float:
    steps = np.linalg.norm(np.diff(path, axis=0), axis=1)
    return graded(float(steps.max() / max(steps.sum(), 1e-9)), most, min(2 * most, 1))


def _bounce(path: Path, direction: str | None) -> Criteria:
    """Down and up again at least once, and sideways if that is asked for."""
    height = path[:, 1]
    turns = _turns(height)
    swings = np.diff(turns)
    best = max((min(down, -up) for down, up in pairwise(swings)), default=0.0)
    way, shaken = float(np.abs(swings).sum()), float(np.abs(np.diff(height)).sum())
    sideways = 0.0 if direction is None else float((path[-1, 0] - path[0, 0]) * DIRECTIONS[direction][0])
    return {
        "direction": 1.0 if direction is None else graded(sideways, DISTANCE, 0),
        "speed": graded(best, DISTANCE, 0),
        "shape": graded((shaken - way) / max(way, 1e-9), 0.2, 0.6),
        "even": _even(height[:, None], STEP["bounce"]),
    }


def _turns(height: Path) -> Path:
    """The first value, every extreme that is followed by a way back of `TURN` or more, and the last extreme."""
    turns, extreme, rising = [float(height[0])], float(height[0]), 0
    for value in map(float, height):
        way = 1 if value > extreme else -1
        if rising in (0, way):
            if rising == way or abs(value - extreme) >= TURN:
                extreme, rising = value, way
        elif abs(value - extreme) >= TURN:
            turns.append(extreme)
            extreme, rising = value, way
    return np.array([*turns, extreme])
