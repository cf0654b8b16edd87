"""Flaws of clips, each with a severity from 0 (hardly visible) to 1, and clips that show something else than asked.

Flaws, mild, make the base model's training data imperfect. Wrong clips test the rewards.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from PIL import Image

from tools.mini import flaws as of_pictures
from tools.mini.scenes import COLOURS, Scene
from tools.mini_video.render import Frames
from tools.mini_video.scenes import FRAMES, Clip, caption_of, clip_of

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
OTHER_SPEED = {"slow": "fast", "fast": "slow"}


# Of the pixels of a clip


def blurred(frames: Frames, severity: float, dice: random.Random) -> Frames:
    return _each(of_pictures.blurred, frames, severity, dice)


def pale(frames: Frames, severity: float, dice: random.Random) -> Frames:
    return _each(of_pictures.pale, frames, severity, dice)


def grainy(frames: Frames, severity: float, dice: random.Random) -> Frames:
    return _each(of_pictures.grainy, frames, severity, dice)


def stuttering(frames: Frames, severity: float, dice: random.Random) -> Frames:
    """Each frame stays for two to five, and those after it are left out."""
    hold = 2 + round(3 * severity)
    return frames[np.arange(len(frames)) // hold * hold]


def flickering(frames: Frames, severity: float, dice: random.Random) -> Frames:
    """Every frame of another brightness."""
    light = np.array([1 + dice.uniform(-1, 1) * (0.05 + 0.4 * severity) for _ in frames])
    return np.asarray((frames * light[:, None, None, None]).round().clip(0, 255), dtype=np.uint8)


def _each(
    flaw: Callable[[Image.Image, float, random.Random], Image.Image],
    frames: Frames,
    severity: float,
    dice: random.Random,
) -> Frames:
    return np.stack([np.asarray(flaw(Image.fromarray(frame), severity, dice)) for frame in frames])


# Of what a clip shows


def jittery(clip: Clip, severity: float, dice: random.Random) -> Clip:
    """Objects and signs shake from frame to frame."""
    far = 0.01 + 0.06 * severity

    def shaken(scene: Scene) -> Scene:
        across, down = dice.uniform(-far, far), dice.uniform(-far, far)
        items = tuple(replace(item, x=item.x + across, y=item.y + down) for item in scene.items)
        sign = scene.sign and replace(scene.sign, x=scene.sign.x + across, y=scene.sign.y + down)
        return replace(scene, items=items, sign=sign)

    return replace(clip, scenes=tuple(map(shaken, clip.scenes)))


def recoloured(clip: Clip, severity: float, dice: random.Random) -> Clip:
    """Objects and signs take on another colour, for the last fifth of the clip up to the last two thirds."""
    start = FRAMES - round(FRAMES * (0.2 + 0.45 * severity))
    colour = dice.choice(COLOURS)
    return replace(clip, scenes=(*clip.scenes[:start], *(_painted(scene, colour) for scene in clip.scenes[start:])))


def _painted(scene: Scene, colour: str) -> Scene:
    items = tuple(replace(item, colour=colour) for item in scene.items)
    return replace(scene, items=items, sign=scene.sign and replace(scene.sign, colour=colour))


OF_PIXELS = (blurred, pale, stuttering, flickering)
OF_SCENES = (jittery, recoloured)


def misdescribed(clip: Clip, dice: random.Random) -> str:
    """A caption with another direction or speed; its own if it names neither."""
    motion = clip.metadata.get("motion", {})
    changes = [
        {**motion, key: other[motion[key]]}
        for key, other in (("direction", OPPOSITE), ("speed", OTHER_SPEED))
        if key in motion
    ]
    return caption_of(dice.choice(changes)) if changes else clip.caption


# Clips with one thing wrong; None where that cannot be wrong


def wrong_direction(clip: Clip, dice: random.Random) -> Clip | None:
    """The other way, or backwards in time; a bounce is turned upside down."""
    motion = clip.metadata["motion"]
    if motion["kind"] == "bounce":
        return replace(clip, scenes=tuple(_upside_down(scene) for scene in clip.scenes))
    if "direction" in motion:
        return clip_of({**motion, "direction": OPPOSITE[motion["direction"]]}, dice)
    return replace(clip, scenes=clip.scenes[::-1])


def _upside_down(scene: Scene) -> Scene:
    return replace(scene, items=tuple(replace(item, y=1 - item.y) for item in scene.items))


def wrong_speed(clip: Clip, dice: random.Random) -> Clip | None:
    motion = clip.metadata["motion"]
    return clip_of({**motion, "speed": OTHER_SPEED[motion["speed"]]}, dice) if "speed" in motion else None


def still(clip: Clip, dice: random.Random) -> Clip | None:
    return replace(clip, scenes=clip.scenes[:1] * FRAMES)


def wrong_colour(clip: Clip, dice: random.Random) -> Clip | None:
    shown = {item.colour for item in clip.scenes[0].items}
    colour = dice.choice([colour for colour in COLOURS if colour not in shown])
    return replace(clip, scenes=tuple(_painted(scene, colour) for scene in clip.scenes))


def jumping(clip: Clip, dice: random.Random) -> Clip | None:
    """Where it began, and from half-way on where it ends."""
    half = FRAMES // 2
    return replace(clip, scenes=clip.scenes[:1] * half + clip.scenes[-1:] * (FRAMES - half))


def held(clip: Clip, dice: random.Random) -> Clip | None:
    """Every fourth frame stays until the next."""
    return replace(clip, scenes=tuple(clip.scenes[frame // 4 * 4] for frame in range(FRAMES)))


def vanishing(clip: Clip, dice: random.Random) -> Clip | None:
    """Nothing is left in the last four frames."""
    return replace(clip, scenes=(*clip.scenes[:-4], *(replace(scene, items=()) for scene in clip.scenes[-4:])))


WRONG: dict[str, Callable[[Clip, random.Random], Clip | None]] = {
    "direction": wrong_direction,
    "speed": wrong_speed,
    "no motion": still,
    "colour": wrong_colour,
    "jump": jumping,
    "stutter": held,
    "vanishing": vanishing,
}
