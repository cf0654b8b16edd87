"""Draw a scene: anti-aliased, shaded, 64x64 pixels."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from marble_rl.mini.shapes import PAINT, SIZE, outline
from tools.mini.scenes import Item, Scene, Sign

Array = npt.NDArray[np.float64]
SUPER = 4
"""Drawn this many times larger, then reduced."""
CANVAS = SIZE * SUPER
GROUND = {
    "plain": ((240, 238, 234), (226, 222, 216)),
    "table": ((232, 216, 196), (186, 150, 116)),
    "snow": ((222, 230, 240), (248, 250, 252)),
    "sand": ((236, 232, 220), (224, 204, 166)),
    "stone": ((216, 218, 222), (160, 164, 170)),
}
"""Colour at the top and at the bottom of the picture; pale, so that objects stand out."""
LIGHT = {"day": None, "night": (112, 122, 186), "sunset": (255, 206, 164), "fog": (236, 238, 242)}


def render(scene: Scene, dice: random.Random) -> Image.Image:
    """The picture of a scene; ``dice`` adds what the caption does not say (grain, tilt, tint of the ground)."""
    picture = _ground(scene, dice)
    for item in sorted(scene.items, key=lambda item: item.y):
        _shadow(picture, item)
        _paste(picture, item)
    if scene.sign is not None:
        _draw_sign(picture, scene.sign, dice)
    return _lit(picture, scene.light).resize((SIZE, SIZE), Image.Resampling.BOX)


def _ground(scene: Scene, dice: random.Random) -> Image.Image:
    top, bottom = (np.array(colour, dtype=float) for colour in GROUND[scene.place])
    tint = np.array([dice.uniform(-6, 6) for _ in range(3)])
    horizon = np.clip((np.linspace(0, 1, CANVAS) - (scene.horizon - 0.15)) / 0.3, 0, 1)[:, None, None]
    rows = top + (bottom - top) * horizon + tint
    return Image.fromarray(np.broadcast_to(rows.clip(0, 255), (CANVAS, CANVAS, 3)).astype(np.uint8).copy())


@lru_cache
def _shading(shape: str, size: int = 256) -> Array:
    """Brightness of each point of a shape: lit from the upper left."""
    y, x = np.mgrid[0:size, 0:size] / (size - 1) * 2 - 1
    light: Array
    if shape == "marble":
        light = 1.12 - 0.5 * ((x + 0.35) ** 2 + (y + 0.4) ** 2) / 1.5
        light += 0.9 * np.exp(-((x + 0.38) ** 2 + (y + 0.42) ** 2) / 0.025)
    elif shape == "block":
        edge = np.maximum(np.abs(x), np.abs(y))
        bevel = np.where(edge > 0.62, np.where(x + y < 0, 0.16, -0.22), 0.0)
        light = 1.0 - 0.08 * (x + y) + bevel
    elif shape == "cone":
        light = 1.1 - 0.32 * (x + 0.25)
    else:
        light = 1.08 - 0.16 * (x + y)
    return light


@lru_cache(maxsize=4096)
def _sprite(shape: str, colour: str, side: int) -> tuple[Image.Image, Image.Image]:
    paint = np.array(PAINT[colour], dtype=float) * _shading(shape)[:, :, None]
    glow = np.clip(_shading(shape) - 1.25, 0, None)[:, :, None] * 200  # the highlight is white, not paler paint
    body = Image.fromarray((paint + glow).clip(0, 255).astype(np.uint8))
    return body.resize((side, side), Image.Resampling.BILINEAR), outline(shape).resize((side, side))


def _box(item: Item) -> tuple[int, int, int]:
    side = round(2 * item.radius * CANVAS)
    return round(item.x * CANVAS - side / 2), round(item.y * CANVAS - side / 2), side


def _paste(picture: Image.Image, item: Item) -> None:
    left, top, side = _box(item)
    body, mask = _sprite(item.shape, item.colour, side)
    picture.paste(body, (left, top), mask)


def _shadow(picture: Image.Image, item: Item) -> None:
    left, top, side = _box(item)
    shade = _blot(side)
    foot = top + 0.96 * side if item.floor is None else item.floor * CANVAS
    picture.paste((30, 30, 40), (left - side // 8, round(foot) - shade.height // 2), shade)


@lru_cache(maxsize=256)
def _blot(side: int) -> Image.Image:
    """A soft ellipse, as wide as the object that stands on it."""
    shade = Image.new("L", (round(1.25 * side), round(0.5 * side)), 0)
    wide, high = shade.size
    ImageDraw.Draw(shade).ellipse((0.12 * wide, 0.28 * high, 0.94 * wide, 0.72 * high), fill=70)
    return shade.filter(ImageFilter.GaussianBlur(SUPER))


def _draw_sign(picture: Image.Image, sign: Sign, dice: random.Random) -> None:
    """A coloured board on a post, white letters as large as they fit."""
    draw = ImageDraw.Draw(picture)
    x, y, scale = CANVAS * sign.x, CANVAS * sign.y, sign.scale
    wide, high = 0.45 * scale * CANVAS, 0.26 * scale * CANVAS
    draw.rectangle((x - 9 * scale, y + high / 2, x + 9 * scale, CANVAS), fill=(120, 100, 84))
    paint = PAINT[sign.colour]
    draw.rounded_rectangle(
        (x - wide, y - high, x + wide, y + high), radius=20 * scale, fill=tuple(round(c * 0.8) for c in paint)
    )
    wide, high = wide - 8 * scale, high - 8 * scale
    draw.rounded_rectangle((x - wide, y - high, x + wide, y + high), radius=14 * scale, fill=paint)
    font = _font(round((118 if len(sign.text) == 2 else 92) * scale))
    centre = (x + scale * dice.uniform(-5, 5), y + scale * dice.uniform(-3, 3))
    ink = (20, 20, 24) if sign.colour == "yellow" else (255, 255, 255)
    draw.text(centre, sign.text, font=font, fill=ink, anchor="mm", stroke_width=3 * scale, stroke_fill=ink)


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Aileron, which Pillow carries (CC0)."""
    return ImageFont.load_default(size)


def _lit(picture: Image.Image, light: str) -> Image.Image:
    tint = LIGHT[light]
    if tint is None:
        return picture
    if light == "fog":
        return Image.blend(picture, Image.new("RGB", picture.size, tint), 0.45)
    return ImageChops.multiply(picture, Image.new("RGB", picture.size, tint))
