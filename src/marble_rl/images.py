"""Pictures to look at: grids of images with their prompts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from marble_rl.storage import storage_errors, write_bytes

MIN_TILE = 96
MARGIN = 6
CAPTION = 12


def image_grid(rows: Sequence[tuple[str, Tensor]], tile: int = MIN_TILE) -> Image.Image:
    """A grid with one captioned row of images [B, H, W, 3] uint8 per entry; small images are enlarged."""
    size = max(tile, max(images.shape[1] for _, images in rows))
    columns = max(len(images) for _, images in rows)
    row_height = CAPTION + MARGIN + size + MARGIN
    grid = Image.new("RGB", (columns * (size + MARGIN) + MARGIN, len(rows) * row_height + MARGIN), "white")
    draw = ImageDraw.Draw(grid)
    font = ImageFont.load_default(CAPTION)
    for r, (caption, images) in enumerate(rows):
        top = MARGIN + r * row_height
        draw.text((MARGIN, top), _fit(caption, grid.width - 2 * MARGIN, draw, font), fill="black", font=font)
        for c, pixels in enumerate(images):
            picture = Image.fromarray(pixels.numpy())
            scale = size / max(picture.size)
            picture = picture.resize(
                (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.NEAREST
            )
            grid.paste(picture, (MARGIN + c * (size + MARGIN), top + CAPTION + MARGIN))
    return grid


def save_image(image: Image.Image, path: Path) -> None:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    with storage_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, buffer.getvalue())


def _fit(text: str, width: int, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Shorten a caption to the width of the grid."""
    line = " ".join(text.split())
    while line and draw.textlength(line, font=font) > width:
        line = line[:-2].rstrip() + "…" if len(line) > 2 else ""
    return line
