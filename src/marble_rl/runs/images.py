"""Sheets of samples: grids with prompts, comparisons with scores. Of images a sheet is one picture, of videos a video
in which all of them play. And the files of sheets and of single samples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from marble_rl.runs.media import encoded, note_of, opened_frames, png, webp
from marble_rl.storage import RESUME, storage_errors, write_bytes

ImageT = TypeVar("ImageT")
MIN_TILE = 96
VIDEO_TILE = 160
"""Largest side of a video in a grid: a sheet of full-size ones takes minutes to write."""
MARGIN = 6
CAPTION = 12
SMALL = 10
LINE = 14
SHEET_QUALITY = 80
"""Of a sheet that moves."""


@dataclass(frozen=True)
class Sheet:
    """A canvas with captions, and the samples on it."""

    canvas: Image.Image
    places: list[tuple[Tensor, tuple[int, int], int]]
    """Of each sample its pixels [H, W, 3], of a video [F, H, W, 3]; its corner; and the side of its tile"""
    note: str = ""
    """What the file keeps beside the pixels"""

    @property
    def frames(self) -> list[Image.Image]:
        """One; or as many as the longest video has. A shorter one stops at its last frame."""
        frames = []
        for t in range(max(len(_frames(pixels)) for pixels, _, _ in self.places)):
            frame = self.canvas.copy()
            for pixels, corner, tile in self.places:
                shown = _frames(pixels)
                frame.paste(_resized(shown[min(t, len(shown) - 1)], tile), corner)
            frames.append(frame)
        return frames


def image_grid(rows: Sequence[tuple[str, Tensor]], tile: int = MIN_TILE) -> Sheet:
    """A grid with one captioned row of images [B, H, W, 3] or videos [B, F, H, W, 3], uint8, per entry.

    Small ones are enlarged, large videos shrunk. `grid_rows` gets the rows back from the file.
    """
    size = max(tile, max(images.shape[-3] for _, images in rows))
    if rows[0][1].ndim == 5:
        size = min(size, max(tile, VIDEO_TILE))
    columns = max(len(images) for _, images in rows)
    column = size + MARGIN
    row_height = CAPTION + MARGIN + size + MARGIN
    grid = Image.new("RGB", (columns * column + MARGIN, len(rows) * row_height + MARGIN), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(CAPTION)
    places = []
    for r, (caption, images) in enumerate(rows):
        top = MARGIN + r * row_height
        draw.text((MARGIN, top), _fit(caption, grid.width - 2 * MARGIN, draw, font), fill="black", font=font)
        places += [(pixels, (MARGIN + c * column, top + CAPTION + MARGIN), size) for c, pixels in enumerate(images)]
    return Sheet(grid, places, json.dumps({"prompts": [caption for caption, _ in rows], "tile": size}))


@dataclass(frozen=True)
class GridRow:
    """A row of an `image_grid`: its samples side by side."""

    prompt: str
    frames: list[Image.Image]
    fps: int


def grid_rows(grid: Image.Image) -> list[GridRow]:
    """The rows of an opened `image_grid`; empty if the file lacks the note (older runs)."""
    try:
        rows = json.loads(note_of(grid))
        prompts, size = [str(prompt) for prompt in rows["prompts"]], int(rows["tile"])
    except (KeyError, TypeError, ValueError):
        return []
    frames, fps = opened_frames(grid)
    tops = [MARGIN + r * (CAPTION + size + 2 * MARGIN) + CAPTION + MARGIN for r in range(len(prompts))]
    return [
        GridRow(prompt, [frame.crop((MARGIN, top, grid.width - MARGIN, top + size)) for frame in frames], fps)
        for prompt, top in zip(prompts, tops, strict=True)
    ]


@dataclass(frozen=True)
class Picture(Generic[ImageT]):
    """An image with its scores."""

    label: str
    """The weights, or the method, that it was made with"""
    image: ImageT
    """Its pixels [H, W, 3] uint8, of a video [F, H, W, 3]; a report has the file here, then the image in the page"""
    scores: Mapping[str, float]
    notes: Mapping[str, str] = field(default_factory=dict)
    """By reward, what it noted on the image, such as the text that it read"""


@dataclass(frozen=True)
class Card(Generic[ImageT]):
    """Images of one prompt, from the same noise, side by side. The scores of the others are compared with those of the
    first."""

    prompt: str
    pictures: tuple[Picture[ImageT], ...]
    source: str = ""


def comparison(columns: Sequence[Sequence[Card[Tensor]]], tile: int = 128) -> Sheet:
    """Cards in columns. Under each picture its scores: green where better than the first picture's, red where worse."""
    cards = [card for column in columns for card in column]
    lines = max(len(picture.scores) for card in cards for picture in card.pictures)
    width = max(len(card.pictures) for card in cards) * (tile + MARGIN) + 3 * MARGIN
    height = 2 * LINE + tile + lines * LINE + 4 * MARGIN
    sheet = Sheet(Image.new("RGB", (width * len(columns), height * max(map(len, columns))), "white"), [])
    for x, column in enumerate(columns):
        for y, card in enumerate(column):
            _draw_card(sheet, card, (x * width + 2 * MARGIN, y * height + MARGIN), width - 4 * MARGIN, tile)
    return sheet


def _draw_card(sheet: Sheet, card: Card[Tensor], corner: tuple[int, int], width: int, tile: int) -> None:
    draw = ImageDraw.Draw(sheet.canvas)
    font, small = ImageFont.load_default(CAPTION), ImageFont.load_default(SMALL)
    left, top = corner
    draw.text(corner, _fit(card.prompt, width, draw, font), fill="black", font=font)
    for i, picture in enumerate(card.pictures):
        x, y = left + i * (tile + MARGIN), top + LINE + 2
        draw.text((x, y), picture.label, fill="dimgray", font=small)
        sheet.places.append((picture.image, (x, y + LINE), tile))
        for line, (name, score) in enumerate(picture.scores.items()):
            before = card.pictures[0].scores.get(name, score)
            colour = "dimgray" if abs(score - before) < 0.005 else "green" if score > before else "firebrick"
            position = (x, y + LINE + tile + MARGIN // 2 + line * LINE)
            draw.text(position, f"{name} {score:.2f}", fill=colour, font=small)


def shrunk(pixels: Tensor, tile: int) -> Tensor:
    """No larger than a tile needs it: pictures that wait for their grid."""
    if pixels.ndim == 4:
        return torch.stack([shrunk(frame, tile) for frame in pixels])
    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((tile, tile), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture))


def _frames(pixels: Tensor) -> Tensor:
    """[F, H, W, 3] of a video; an image is one frame."""
    return pixels if pixels.ndim == 4 else pixels[None]


def _resized(pixels: Tensor, size: int) -> Image.Image:
    """An image [H, W, 3] resized to fit a tile."""
    picture = Image.fromarray(pixels.numpy())
    scale = size / max(picture.size)
    return picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)


def save_sample(pixels: Tensor, path: Path, then: str = RESUME, fps: int | None = None) -> Path:
    """Write an image [H, W, 3] as PNG, or a video [F, H, W, 3] as animated WebP; returns ``path`` with the suffix.

    An existing file is kept, and the new name gets a number. ``then``: what to do if it cannot be written, for the
    error message.
    """
    suffix = ".png" if pixels.ndim == 3 else ".webp"
    return save_as(pixels, path.with_name(f"{path.name}{suffix}"), then, fps)


def save_as(pixels: Tensor, path: Path, then: str = RESUME, fps: int | None = None) -> Path:
    """As `save_sample`, in the format of the suffix of ``path``; returns the file."""
    file = unused(path)
    save_file(encoded(pixels, path.suffix.lower(), fps), file, then)
    return file


def unused(file: Path) -> Path:
    """The name itself, or the first of `name-2`, `name-3`, ... that is free."""
    further: Iterator[Path] = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([file], further) if not name.exists())


def save_sheet(sheet: Sheet, path: Path, then: str = RESUME, fps: int | None = None) -> Path:
    """Write `sheet_file`; returns ``path`` with its suffix. A file of the other kind, from earlier, is removed."""
    data, suffix = sheet_file(sheet, fps)
    names = [path.with_name(f"{path.name}{each}") for each in (".png", ".webp")]
    file, other = names if suffix == ".png" else names[::-1]
    save_file(data, file, then)
    with storage_errors(str(other), then):
        other.unlink(missing_ok=True)
    return file


def sheet_file(sheet: Sheet, fps: int | None = None) -> tuple[bytes, str]:
    """The file and its suffix: a PNG, or an animated WebP where something moves."""
    frames = sheet.frames
    if len(frames) == 1:
        return png(frames[0], sheet.note), ".png"
    return webp(frames, fps, SHEET_QUALITY, sheet.note), ".webp"


def save_file(data: bytes, path: Path, then: str = RESUME) -> None:
    """Write it in one piece, with the folders above it."""
    with storage_errors(str(path), then):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data)


def _fit(text: str, width: int, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Shorten a caption to the width of the grid, by bisection: measuring a long prompt is slow."""
    line = " ".join(text.split())
    if len(line) <= width and draw.textlength(line, font=font) <= width:
        return line
    fits, too_long = 0, min(len(line), width)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if draw.textlength(line[:middle] + "…", font=font) <= width:
            fits = middle
        else:
            too_long = middle
    return line[:fits].rstrip() + "…" if fits else ""
