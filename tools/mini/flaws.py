"""Flaws of pictures, each with a severity from 0 (hardly visible) to 1 (the picture is unrecognisable).

A few of them, mild, make the base model's training data imperfect. The reward models learn to dislike all of them, at
every severity: a model that is trained on a reward exploits every flaw that the reward does not see.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageEnhance, ImageFilter
from scipy.ndimage import gaussian_filter, map_coordinates

Pixels = npt.NDArray[np.float64]


def blurred(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    return picture.filter(ImageFilter.GaussianBlur(0.6 + 3.4 * severity))


def pale(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    return ImageEnhance.Contrast(picture).enhance(0.75 * (1 - severity) + 0.05)


def crooked(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """Shift every point by a smooth random field."""
    width, height = picture.size
    shift = np.stack([gaussian_filter(field, 5) for field in _noise(dice, (2, height, width))])
    shift *= (0.6 + 4.4 * severity) / shift.std()
    points = np.mgrid[0:height, 0:width] + shift
    pixels = np.asarray(picture, dtype=float)
    return _image(np.stack([map_coordinates(pixels[..., c], points, order=1, mode="nearest") for c in range(3)], -1))


def grainy(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """Noise in grains of one to three pixels."""
    size = dice.uniform(0, 1.5)
    grain = np.stack([gaussian_filter(field, size) for field in _noise(dice, (3, *picture.size[::-1]))], -1)
    return _image(np.asarray(picture) + grain / grain.std() * (4 + 64 * severity))


def blotched(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """Large soft stains of random colours."""
    stain = np.stack([gaussian_filter(field, 6) for field in _noise(dice, (3, *picture.size[::-1]))], -1)
    return _image(np.asarray(picture) + stain / stain.std() * (4 + 60 * severity))


def shuffled(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """Some tiles of the picture change places."""
    pixels = np.array(picture)
    tile = dice.choice((8, 16))
    corners = [(y, x) for y in range(0, pixels.shape[0], tile) for x in range(0, pixels.shape[1], tile)]
    chosen = dice.sample(corners, max(2, round(severity * len(corners))))
    tiles = [pixels[y : y + tile, x : x + tile].copy() for y, x in chosen]
    for (y, x), moved in zip(chosen, tiles[1:] + tiles[:1], strict=True):
        pixels[y : y + tile, x : x + tile] = moved
    return Image.fromarray(pixels)


def erased(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """A soft-edged part of the picture fades into the colour of its upper edge."""
    pixels = np.asarray(picture, dtype=float)
    height, width = pixels.shape[:2]
    y, x = np.mgrid[0:height, 0:width]
    centre_y, centre_x = dice.uniform(0.25, 0.75) * height, dice.uniform(0.25, 0.75) * width
    radius = (0.12 + 0.4 * severity) * width
    mask = np.clip((radius - np.hypot(y - centre_y, x - centre_x)) / 4, 0, 1)[..., None]
    return _image(pixels * (1 - mask) + pixels[0].mean(axis=0) * mask)


def doubled(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """A shifted copy shines through."""
    far = 2 + 10 * severity
    across, down = (round(dice.choice((-1, 1)) * dice.uniform(0.3, 1) * far) for _ in range(2))
    return Image.blend(picture, ImageChops.offset(picture, across, down), 0.2 + 0.3 * severity)


def garish(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """Too much contrast and saturation."""
    strong = ImageEnhance.Contrast(picture).enhance(1.3 + 1.7 * severity)
    return ImageEnhance.Color(strong).enhance(1.3 + 2 * severity)


def tinted(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """A cast of one colour, or too dark or too light."""
    cast = tuple(dice.choice((0, 128, 255)) for _ in range(3))
    return Image.blend(picture, Image.new("RGB", picture.size, cast), 0.1 + 0.5 * severity)


def softened(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """Flat areas of one colour, as in over-smoothed pictures."""
    smooth = picture
    for _ in range(1 + round(4 * severity)):
        smooth = smooth.filter(ImageFilter.MedianFilter(5))
    return smooth


FLAWS: tuple[Callable[[Image.Image, float, random.Random], Image.Image], ...] = (
    blurred,
    pale,
    crooked,
    grainy,
    blotched,
    shuffled,
    erased,
    doubled,
    garish,
    tinted,
    softened,
)


def with_flaws(picture: Image.Image, severity: float, dice: random.Random) -> Image.Image:
    """One or two flaws of the given severity."""
    for flaw in dice.sample(FLAWS, dice.choice((1, 1, 2))):
        picture = flaw(picture, severity, dice)
    return picture


def _noise(dice: random.Random, shape: tuple[int, ...]) -> Pixels:
    return np.random.default_rng(dice.getrandbits(32)).normal(0, 1, shape)


def _image(pixels: npt.NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
