"""The detector `mini` of `geneval` and `trajectory`: finds the mini world's objects by rule.

Areas of one paint are compared with the outlines of the shapes. It is strict: a blurred, crooked or half-drawn object
is not like any outline, and is not found.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from marble_rl.errors import InputError
from marble_rl.mini.shapes import PAINT, SHAPES, SIZE, outline
from marble_rl.rewards.builtin.detection import Detection
from marble_rl.rewards.core.base import Images
from marble_rl.section import Fraction, Section

Mask = npt.NDArray[np.bool_]
COLOURED = 60
"""Least difference between the strongest and the weakest channel of a painted pixel; the background is paler."""
SMALLEST = 60
"""Pixels; the smallest object of the world has about 90."""
LARGEST = SIZE * SIZE // 2
"""Pixels; a whole picture of one colour is not a block."""
LIKENESS = {"marble": 0.78, "block": 0.78, "cone": 0.72, "star": 0.58}
"""Least intersection over union with a shape's outline; a small star is mostly edge."""
PROPORTIONS = (0.7, 1.4)
SIDE = 32
ADVICE = (
    f"It finds only {', '.join(SHAPES)} in {', '.join(PAINT)}; for photographs give the reward "
    "`params: {detector: photo}`, or name other `rewards` for this source"
)


class MiniDetector:
    """Objects by colour and outline. Nothing to load."""

    class Params(Section):
        halo: Fraction = 0.0
        """Pixels at the edge of an object whose colour is weaker than this share of its strongest are left out. 0.4
        undoes what blur adds to an outline; 0: all painted pixels count."""

    def __init__(self, **params: Any) -> None:
        self.params = self.Params(**params)

    def load(self, device: torch.device) -> None:
        return None

    def detect(self, images: Images) -> list[list[Detection]]:
        return [_objects(image, self.params.halo) for image in images]

    def check_findable(self, metadata: Mapping[str, Any]) -> None:
        """It sees the mini world's shapes in its paints, and nothing else."""
        for entry in (*metadata["include"], *metadata.get("exclude", ())):
            name = entry["class"]
            if name not in SHAPES:
                raise InputError(f"asks for {name!r}, which the detector `mini` does not know. {ADVICE}")
            if "color" in entry and entry["color"] not in PAINT:
                raise InputError(
                    f"asks for the color {entry['color']!r}, which the detector `mini` does not know. {ADVICE}"
                )


def _objects(image: npt.NDArray[np.uint8], halo: float) -> list[Detection]:
    from scipy import ndimage  # slow to import

    pixels = image.astype(float)
    strength = pixels.max(axis=-1) - pixels.min(axis=-1)
    painted = strength > COLOURED
    paint = np.full(painted.shape, -1)
    paint[painted] = (_hues(pixels[painted]) @ _paint_hues().T).argmax(axis=-1)
    objects = []
    for number, colour in enumerate(PAINT):
        alike = paint == number
        if alike.sum() < SMALLEST // 3:  # too few, even as the rim of a hole
            continue
        areas, count = ndimage.label(alike)
        for area, place in zip(range(1, count + 1), ndimage.find_objects(areas), strict=True):
            mask = areas[place] == area
            if halo and mask.sum() >= SMALLEST // 3:
                mask &= strength[place] >= halo * np.quantile(strength[place][mask], 0.9)
                mask, place = _cut_to_size(mask, place)
            mask = ndimage.binary_fill_holes(mask)  # a marble's highlight is white
            if not SMALLEST <= mask.sum() <= LARGEST:
                continue
            name, likeness = _shape(mask)
            if name and likeness >= LIKENESS[name]:
                rows, columns = place
                box = (columns.start, rows.start, columns.stop, rows.stop)
                objects.append(Detection(name, colour, box, likeness))
    return objects


def _cut_to_size(mask: Mask, place: tuple[slice, slice]) -> tuple[Mask, tuple[slice, slice]]:
    """A smaller mask of an area, and its place in the picture."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    top, left = place[0].start, place[1].start
    cut = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    return mask[cut], (slice(top + rows[0], top + rows[-1] + 1), slice(left + columns[0], left + columns[-1] + 1))


def _shape(mask: Mask) -> tuple[str, float]:
    """The outline that covers an area best, and how well."""
    height, width = mask.shape
    if not PROPORTIONS[0] <= width / height <= PROPORTIONS[1]:
        return "", 0.0
    square = _fitted(mask)
    likeness = {shape: _overlap(square, _outline(shape)) for shape in SHAPES}
    best = max(likeness, key=likeness.__getitem__)
    return best, likeness[best]


def _overlap(a: Mask, b: Mask) -> float:
    return float((a & b).sum() / (a | b).sum())


def _fitted(mask: Mask) -> Mask:
    """Stretched to a square of `SIDE` pixels."""
    resized = Image.fromarray(mask.astype(np.uint8) * 255).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(resized) >= 128


@lru_cache
def _outline(shape: str) -> Mask:
    drawn = np.asarray(outline(shape)) >= 128
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    return _fitted(drawn[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


def _hues(colours: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Unit direction away from grey [..., 3]: the same in light and in shade."""
    away = colours - colours.mean(axis=-1, keepdims=True)
    return np.asarray(away / np.maximum(np.linalg.norm(away, axis=-1, keepdims=True), 1e-9))


@lru_cache
def _paint_hues() -> npt.NDArray[np.float64]:
    return _hues(np.array(list(PAINT.values()), dtype=float))
