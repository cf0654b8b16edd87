"""Draw a sheet of clips to look at: one clip a row, one frame a column. A .webp or .gif moves instead.

python -m tools.mini_video.show build/clips.webp
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from PIL import Image, ImageDraw, ImageFont

from tools.mini_video.render import render_clip
from tools.mini_video.scenes import FPS, SOURCES, Clip, draw_clip

ZOOM = 2
CAPTION = 14
"""Height of the line above a clip."""


def sheet(clips: list[Clip], dice: random.Random) -> Image.Image:
    """Every frame of every clip."""
    rows = []
    for clip in clips:
        frames = np.pad(render_clip(clip, dice), ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=255)
        rows.append(_labelled(np.concatenate(list(frames), axis=1), clip.caption))
    return Image.fromarray(np.concatenate(rows))


def moving(clips: list[Clip], dice: random.Random, across: int) -> list[Image.Image]:
    """All clips side by side, one picture a frame."""
    videos = [render_clip(clip, dice).repeat(ZOOM, axis=1).repeat(ZOOM, axis=2) for clip in clips]
    blank = np.full_like(videos[0], 255)
    videos += [blank] * (-len(videos) % across)
    rows = [np.concatenate(videos[i : i + across], axis=2) for i in range(0, len(videos), across)]
    return [Image.fromarray(frame) for frame in np.concatenate(rows, axis=1)]


def _labelled(picture: npt.NDArray[np.uint8], text: str) -> npt.NDArray[np.uint8]:
    line = Image.new("RGB", (picture.shape[1], CAPTION), "white")
    ImageDraw.Draw(line).text((2, 0), text, fill="black", font=ImageFont.load_default(11))
    return np.concatenate([np.asarray(line), picture])


def main(
    out: Annotated[Path, typer.Argument(help="A .png, or a .webp or .gif that moves.")],
    count: Annotated[int, typer.Option(help="Clips.")] = 24,
    source: Annotated[str, typer.Option(help=f"One of {', '.join(SOURCES)}; all in turn if empty.")] = "",
    seed: int = 0,
) -> None:
    """Draw clips of the mini video world."""
    dice = random.Random(seed)
    clips = [draw_clip(source or SOURCES[i % len(SOURCES)], dice) for i in range(count)]
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".png":
        sheet(clips, dice).save(out)
        return
    first, *rest = moving(clips, dice, across=6)
    first.save(out, save_all=True, append_images=rest, duration=1000 // FPS, loop=0)


if __name__ == "__main__":
    typer.run(main)
