"""Image files: grids with prompts (of a video, three frames), comparisons with scores, and single samples."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageSequence
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from marble_rl.storage import RESUME, storage_errors, write_bytes

ImageT = TypeVar("ImageT")
MIN_TILE = 96
MARGIN = 6
CAPTION = 12
SMALL = 10
LINE = 14
STILLS = 3
"""How many frames of a video a grid shows: the first, the middle and the last one."""
FRAMES_PER_SECOND = 16
"""Frame rate of saved videos: Wan's"""
ROWS = "marble-rows"
"""Name of the PNG text chunk with a grid's prompts and tile size, which `grid_rows` reads."""


def image_grid(rows: Sequence[tuple[str, Tensor]], tile: int = MIN_TILE) -> Image.Image:
    """A grid with one captioned row of images [B, H, W, 3] or videos [B, F, H, W, 3], uint8, per entry.

    Small images are enlarged. `grid_rows` gets the rows back from the grid.
    """
    size = max(tile, max(images.shape[-3] for _, images in rows))
    columns = max(len(images) for _, images in rows)
    column = _panels(rows[0][1][0]) * size + MARGIN
    row_height = CAPTION + MARGIN + size + MARGIN
    grid = Image.new("RGB", (columns * column + MARGIN, len(rows) * row_height + MARGIN), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(CAPTION)
    for r, (caption, images) in enumerate(rows):
        top = MARGIN + r * row_height
        draw.text((MARGIN, top), _fit(caption, grid.width - 2 * MARGIN, draw, font), fill="black", font=font)
        for c, pixels in enumerate(images):
            grid.paste(_resized(pixels, size), (MARGIN + c * column, top + CAPTION + MARGIN))
    grid.info[ROWS] = json.dumps({"prompts": [caption for caption, _ in rows], "tile": size})
    return grid


def grid_rows(grid: Image.Image) -> list[tuple[str, Image.Image]]:
    """Prompt and pictures of each row of an `image_grid`; empty if the file lacks the text chunk (older runs)."""
    try:
        rows = json.loads(grid.info[ROWS])
        prompts, size = [str(prompt) for prompt in rows["prompts"]], int(rows["tile"])
    except (KeyError, TypeError, ValueError):
        return []
    tops = [MARGIN + r * (CAPTION + size + 2 * MARGIN) + CAPTION + MARGIN for r in range(len(prompts))]
    return [
        (prompt, grid.crop((MARGIN, top, grid.width - MARGIN, top + size)))
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


def comparison(columns: Sequence[Sequence[Card[Tensor]]], tile: int = 128) -> Image.Image:
    """Cards in columns. Under each picture its scores: green where better than the first picture's, red where worse."""
    cards = [card for column in columns for card in column]
    lines = max(len(picture.scores) for card in cards for picture in card.pictures)
    across = _panels(cards[0].pictures[0].image) * tile
    width = max(len(card.pictures) for card in cards) * (across + MARGIN) + 3 * MARGIN
    height = 2 * LINE + tile + lines * LINE + 4 * MARGIN
    sheet = Image.new("RGB", (width * len(columns), height * max(len(column) for column in columns)), "white")
    for x, column in enumerate(columns):
        for y, card in enumerate(column):
            _draw_card(sheet, card, (x * width + 2 * MARGIN, y * height + MARGIN), width - 4 * MARGIN, tile)
    return sheet


def _draw_card(sheet: Image.Image, card: Card[Tensor], corner: tuple[int, int], width: int, tile: int) -> None:
    draw = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(CAPTION), ImageFont.load_default(SMALL)
    left, top = corner
    draw.text(corner, _fit(card.prompt, width, draw, font), fill="black", font=font)
    for i, picture in enumerate(card.pictures):
        x, y = left + i * (_panels(picture.image) * tile + MARGIN), top + LINE + 2
        draw.text((x, y), picture.label, fill="dimgray", font=small)
        sheet.paste(_resized(picture.image, tile), (x, y + LINE))
        for line, (name, score) in enumerate(picture.scores.items()):
            before = card.pictures[0].scores.get(name, score)
            colour = "dimgray" if abs(score - before) < 0.005 else "green" if score > before else "firebrick"
            position = (x, y + LINE + tile + MARGIN // 2 + line * LINE)
            draw.text(position, f"{name} {score:.2f}", fill=colour, font=small)


def shrunk(pixels: Tensor, tile: int) -> Tensor:
    """No larger than a tile needs it, of a video only the frames that it shows: pictures that wait for their grid."""
    if pixels.ndim == 4:
        return torch.stack([shrunk(frame, tile) for frame in _still_frames(pixels)])
    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((tile, tile), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(picture))


def _panels(pixels: Tensor) -> int:
    """Number of tiles of a sample: 1 for an image, `STILLS` for a video."""
    return STILLS if pixels.ndim == 4 else 1


def _still_frames(video: Tensor) -> list[Tensor]:
    return [video[i * (len(video) - 1) // (STILLS - 1)] for i in range(STILLS)]


def _resized(pixels: Tensor, size: int) -> Image.Image:
    """An image [H, W, 3] resized to fit a tile, or frames of a video [F, H, W, 3] side by side."""
    if pixels.ndim == 4:
        stills = [_resized(frame, size) for frame in _still_frames(pixels)]
        strip = Image.new("RGB", (sum(still.width for still in stills), stills[0].height))
        for i, still in enumerate(stills):
            strip.paste(still, (i * still.width, 0))
        return strip
    picture = Image.fromarray(pixels.numpy())
    scale = size / max(picture.size)
    return picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)


def save_sample(pixels: Tensor, path: Path, then: str = RESUME) -> Path:
    """Write an image [H, W, 3] as PNG, or a video [F, H, W, 3] as animated WebP; returns ``path`` with the suffix.

    An existing file is kept, and the new name gets a number. ``then``: what to do if it cannot be written, for the
    error message.
    """
    if pixels.ndim == 3:
        file = _unused(path.with_name(f"{path.name}.png"))
        save_image(Image.fromarray(pixels.numpy()), file, then)
    else:
        file = _unused(path.with_name(f"{path.name}.webp"))
        save_file(webp(pixels), file, then)
    return file


def _unused(file: Path) -> Path:
    """The name itself, or the first of `name-2`, `name-3`, ... that is free."""
    further = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([file], further) if not name.exists())


def webp(pixels: Tensor) -> bytes:
    """A file of an image [H, W, 3] or a video [F, H, W, 3] as lossy WebP, about a tenth of a PNG's size."""
    frames = pixels if pixels.ndim == 4 else pixels[None]
    first, *others = (Image.fromarray(frame) for frame in frames.numpy())
    animation = {"save_all": True, "append_images": others, "duration": round(1000 / FRAMES_PER_SECOND), "loop": 0}
    buffer = io.BytesIO()
    first.save(buffer, "WEBP", quality=90, **(animation if others else {}))
    return buffer.getvalue()


def webp_pixels(data: bytes) -> Tensor:
    """[H, W, 3] uint8, of an animation [F, H, W, 3]: what `webp` was given, up to its loss."""
    with Image.open(io.BytesIO(data)) as image:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    return torch.from_numpy(np.stack(frames) if len(frames) > 1 else frames[0].copy())


def save_image(image: Image.Image, path: Path, then: str = RESUME) -> None:
    """Write a PNG, with the text chunk of a grid."""
    chunks = PngInfo()
    if ROWS in image.info:
        chunks.add_itxt(ROWS, image.info[ROWS])
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=chunks)
    save_file(buffer.getvalue(), path, then)


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
