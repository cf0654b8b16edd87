"""What the embedded model can draw, as far as the detector `mini` needs it: shapes, paints and the size of a picture.

tools/mini has the rest of that world: its scenes, their captions and how they are drawn.
"""

from __future__ import annotations

import math
from functools import lru_cache

from PIL import Image, ImageDraw

SIZE = 64
"""Pixels of a picture's side."""
SHAPES = ("marble", "block", "cone", "star")
PAINT = {
    "red": (214, 40, 48),
    "yellow": (250, 200, 30),
    "green": (36, 160, 76),
    "blue": (40, 98, 214),
    "purple": (140, 60, 180),
}


@lru_cache
def outline(shape: str, size: int = 256) -> Image.Image:
    """Mask of a shape that fills a square."""
    mask = Image.new("L", (size, size), 0)
    draw = ImageDraw.Draw(mask)
    last = size - 1
    if shape == "marble":
        draw.ellipse((0, 0, last, last), fill=255)
    elif shape == "block":
        inset = size // 12
        draw.rounded_rectangle((inset, inset, last - inset, last - inset), radius=size // 10, fill=255)
    elif shape == "cone":
        draw.polygon([(size / 2, 0), (last, last * 0.93), (0, last * 0.93)], fill=255)
    else:
        points = []
        for i in range(10):
            radius = size / 2 * (1.0 if i % 2 == 0 else 0.45)
            angle = math.pi * i / 5
            points.append((size / 2 + radius * math.sin(angle), size / 2 - radius * math.cos(angle)))
        draw.polygon(points, fill=255)
    return mask
