"""Images and videos as files: PNG, JPEG and WebP of an image; animated WebP, GIF and MP4 of a video.

What marble writes by itself is WebP where it moves. Browsers, hubs and chats show it like any picture, Pillow writes it
without a further package, and it takes less than half of a GIF, in all colours (tests/runs/test_media.py).
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageSequence
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.types import Media

SUFFIXES: dict[Media, tuple[str, ...]] = {
    "image": (".png", ".jpg", ".jpeg", ".webp"),
    "video": (".mp4", ".gif", ".webp"),
}
"""Of the files that samples can be written to."""
RATE, SHORT_RATE, SHORT = 16, 8, 32
"""Frames per second: Wan's; and of a video of up to `SHORT` frames, which would be over before it is seen."""
QUALITY = 90
"""Of lossy files; 100 is the best."""
NOTE = "marble-rows"
"""Name of the PNG text chunk that holds the note of a file; in WebP it is the Exif description."""


def frame_rate(frames: int, fps: int | None = None) -> int:
    """Frames per second at which a video is shown: ``fps`` of `logging.fps`, or the default for its length."""
    return fps or (SHORT_RATE if frames <= SHORT else RATE)


def check_writable(suffix: str, key: str) -> None:
    """Refuse MP4 without the package that writes it."""
    if suffix == ".mp4" and importlib.util.find_spec("av") is None:
        raise InputError(
            f"{key}: {suffix} needs the package av, which is not installed; pip install 'marble-rl[video]', or give a "
            "name that ends in .webp or .gif"
        )


def encoded(pixels: Tensor, suffix: str, fps: int | None = None) -> bytes:
    """A file of an image [H, W, 3] or a video [F, H, W, 3], uint8, in the format of its suffix."""
    frames = [Image.fromarray(frame) for frame in (pixels if pixels.ndim == 4 else pixels[None]).numpy()]
    if suffix == ".mp4":
        return _mp4(frames, frame_rate(len(frames), fps))
    if suffix == ".gif":
        return gif(frames, frame_rate(len(frames), fps))
    if suffix == ".png":
        return png(frames[0])
    if suffix == ".webp":
        return webp(frames, fps, whole=True)
    buffer = io.BytesIO()
    frames[0].save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def png(image: Image.Image, note: str = "") -> bytes:
    chunks = PngInfo()
    if note:
        chunks.add_itxt(NOTE, note)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=chunks)
    return buffer.getvalue()


def webp(
    frames: Sequence[Image.Image],
    fps: int | None = None,
    quality: int = QUALITY,
    note: str = "",
    *,
    whole: bool = False,
) -> bytes:
    """Lossy: about a tenth of a PNG's size. Several frames play in a loop. ``note``: ASCII. ``whole``: each frame by
    itself, for files that are judged: the others are smaller, and keep faint traces of what moved."""
    first, *others = frames
    duration = round(1000 / frame_rate(len(frames), fps))
    animation = {"save_all": True, "append_images": others, "duration": duration, "loop": 0}
    animation |= {"kmin": 0, "kmax": 1} if whole else {}
    exif = Image.Exif()
    if note:
        exif[ExifTags.Base.ImageDescription] = note
    buffer = io.BytesIO()
    first.save(buffer, "WEBP", quality=quality, exif=exif, **(animation if others else {}))
    return buffer.getvalue()


def note_of(image: Image.Image) -> str:
    """The note of an opened PNG or WebP; empty if it has none."""
    return str(image.info.get(NOTE) or image.getexif().get(ExifTags.Base.ImageDescription, ""))


def gif(frames: Sequence[Image.Image], fps: int) -> bytes:
    """In 256 colours a frame. Its clock counts hundredths of a second, so that 16 frames a second become 16.7."""
    first, *others = frames
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=10 * round(100 / fps), loop=0)
    return buffer.getvalue()


def _mp4(frames: Sequence[Image.Image], fps: int) -> bytes:
    """H.264 with colours at half resolution, which every player knows."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=fps, options={"crf": "18"})
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode())
    return buffer.getvalue()


def opened_frames(image: Image.Image) -> tuple[list[Image.Image], int]:
    """All frames of an opened file, and frames per second."""
    frames, milliseconds = [], 0
    for frame in ImageSequence.Iterator(image):
        frames.append(frame.convert("RGB"))
        milliseconds += frame.info.get("duration", 0)
    return frames, max(1, round(1000 * len(frames) / milliseconds)) if milliseconds else frame_rate(len(frames))


def decoded(data: bytes) -> Tensor:
    """[H, W, 3] uint8, of an animation [F, H, W, 3]: what `webp` was given, up to its loss."""
    with Image.open(io.BytesIO(data)) as image:
        frames = [np.array(frame) for frame in opened_frames(image)[0]]
    return torch.from_numpy(np.stack(frames) if len(frames) > 1 else frames[0])


def gif_of(file: Path) -> bytes:
    """The GIF of an animation, for programs that show no moving WebP."""
    with Image.open(file) as image:
        return gif(*opened_frames(image))
