"""Pictures inside the page: small, in WebP, as data addresses, and together within a budget. A video is its first
frame, and an animation that the script of the page puts in its place."""

from __future__ import annotations

import base64
import functools
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from markupsafe import Markup
from PIL import Image

from marble_rl.report.run_data import RunData
from marble_rl.runs.images import Card, GridRow, Picture, grid_rows
from marble_rl.runs.media import opened_frames, webp
from marble_rl.storage import open_regular

T = TypeVar("T")
BUDGET = 2_000_000
"""Bytes of all pictures, encoded."""
WIDEST, STRIP = 320, 832
"""Largest width in pixels of one picture, and of a row of them."""
VIDEO_WIDEST, VIDEO_STRIP, MOST_FRAMES = 256, 416, 48
"""The same of videos, and how many of their frames are shown, evenly spaced."""
SIZES = ((512, 82), (384, 82), (320, 82), (256, 80), (192, 75), (144, 70), (112, 60), (80, 50), (64, 30), (48, 20))
"""Width in pixels and WebP's quality: the first with which all pictures fit."""
MEASURED = 24
"""Pictures whose size is taken for that of all."""
MARGIN = 1.15
"""How much larger than those the others may be on average."""
QUALITY = 82
"""Of WebP; 100 is the best"""
MOST_STEPS, MOST_VIDEO_STEPS = 6, 3
MOST_CACHED = 16_384
"""Pictures in memory, a few kilobytes each."""


@dataclass(frozen=True)
class Inlined:
    """A picture in the page."""

    address: Markup
    width: int
    height: int
    file: str = ""
    """Its name, where it is the picture of a file"""
    video: Markup | None = None
    """Address of the animation, where it is a video"""

    @property
    def bytes(self) -> int:
        return len(self.address) + len(self.video or "")


@dataclass(frozen=True)
class ShownStep:
    """Training samples of one step: rows with their prompts, or one picture that has them written in it."""

    step: int
    rows: list[tuple[str, Inlined]]


@dataclass
class Gallery:
    """Takes pictures into the page as long as there is room."""

    remarks: list[str]
    left: int = BUDGET
    _full: bool = field(default=False, init=False)

    def take(self, row: GridRow) -> Inlined | None:
        """None once a picture did not fit."""
        if self._full:
            return None
        return self._taken(_inlined(row.frames, row.fps, VIDEO_STRIP if len(row.frames) > 1 else STRIP))

    def open(self, file: Path, widest: int, quality: int = QUALITY) -> Inlined | None:
        """A picture or video file; None, with a remark, where it cannot be read."""
        return None if self._full else self.read(file, lambda: self._taken(inlined_file(file, widest, quality)))

    def _taken(self, picture: Inlined) -> Inlined | None:
        if picture.bytes > self.left:
            self.remarks.append("Some pictures were left out to keep this page small.")
            self._full = True
            return None
        self.left -= picture.bytes
        return picture

    def read(self, file: Path, use: Callable[[], T]) -> T | None:
        """What ``use`` makes of a picture file; None, with a remark, where it cannot be read."""
        try:
            return use()
        except Image.DecompressionBombError:
            self.remarks.append(f"{file.name} was left out: it has too many pixels to be opened here.")
        except Exception as error:  # of many kinds, according to what is wrong with the file
            self.remarks.append(f"{file.name} could not be shown: {str(error) or type(error).__name__}")
        return None


@contextmanager
def _opened(file: Path) -> Iterator[Image.Image]:
    with warnings.catch_warnings():  # Pillow warns half way to the size that it refuses
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with open_regular(file) as data, Image.open(data) as image:
            yield image


def inlined_file(file: Path, widest: int, quality: int = QUALITY) -> Inlined:
    """Made once: a watched page is built again and again from hundreds of files that stay the same."""
    return _inlined_state(file, file.stat().st_mtime_ns, widest, quality)


@functools.lru_cache(maxsize=MOST_CACHED)
def _inlined_state(file: Path, modified: int, widest: int, quality: int) -> Inlined:
    with _opened(file) as image:
        moves = getattr(image, "n_frames", 1) > 1
        if moves and widest > VIDEO_WIDEST:
            return _inlined_state(file, modified, VIDEO_WIDEST, quality)
        frames, fps = opened_frames(image)
        small = image.width <= widest and len(frames) <= MOST_FRAMES
        if image.format == "WEBP" and small and quality >= QUALITY:  # compressed once is enough
            data = file.read_bytes()
            first = webp(frames[:1], quality=quality) if moves else data
            return Inlined(_address(first), *image.size, file.name, _address(data) if moves else None)
    return _inlined(frames, fps, widest, quality, file.name)


def _inlined(frames: Sequence[Image.Image], fps: int, widest: int, quality: int = QUALITY, name: str = "") -> Inlined:
    every = -(-len(frames) // MOST_FRAMES)
    shown = [_narrowed(frame, widest) for frame in frames[::every]]
    video = _address(webp(shown, max(1, round(fps / every)), quality)) if len(shown) > 1 else None
    return Inlined(_address(webp(shown[:1], quality=quality)), *shown[0].size, name, video)


def _narrowed(image: Image.Image, widest: int) -> Image.Image:
    if image.width <= widest:
        return image
    return image.resize((widest, max(1, round(image.height * widest / image.width))), Image.Resampling.LANCZOS)


def _address(data: bytes) -> Markup:
    return Markup("data:image/webp;base64,") + base64.b64encode(data).decode()


def fitting_size(cards: Sequence[Card[Path]], room: int, widest: int) -> tuple[int, int]:
    """Width, of at most ``widest``, and quality with which all pictures fit into so many bytes."""
    files = [picture.image for card in cards for picture in card.pictures]
    measured = files[:: max(1, len(files) // MEASURED)]
    for width, quality in (size for size in SIZES if size[0] <= widest):
        sizes = [size for file in measured if (size := _bytes(file, width, quality)) is not None]
        if not sizes or MARGIN * statistics.fmean(sizes) * len(files) <= room:
            return width, quality
    return SIZES[-1]


def _bytes(file: Path, width: int, quality: int) -> int | None:
    """In the page; None where the file cannot be read, which `Gallery.open` remarks on."""
    try:
        return inlined_file(file, width, quality).bytes
    except Exception:
        return None


def shown_cards(cards: Sequence[Card[Path]], gallery: Gallery, widest: int = WIDEST) -> list[Card[Inlined]]:
    """The same cards with their pictures in the page; one of which none could be opened is left out."""
    width, quality = fitting_size(cards, gallery.left, widest)
    shown = []
    for card in cards:
        opened = [(picture, gallery.open(picture.image, width, quality)) for picture in card.pictures]
        pictures = tuple(Picture(p.label, image, p.scores, p.notes) for p, image in opened if image is not None)
        if pictures:
            shown.append(Card(card.prompt, pictures, card.source))
    return shown


def least_changes(cards: Sequence[Card[Path]]) -> dict[str, float]:
    """By reward, from where a change is marked: a tenth of how much prompts differ under the first weights."""
    first = [card.pictures[0].scores for card in cards]
    columns = {name: [scores[name] for scores in first if name in scores] for name in {n for f in first for n in f}}
    return {name: 0.1 * statistics.pstdev(column) for name, column in columns.items()}


def training_samples(run: RunData, gallery: Gallery) -> list[ShownStep]:
    """At most `MOST_STEPS` of the stored steps, fewer of videos, evenly spaced, the first and the last among
    them."""
    stored = run.samples
    videos = bool(stored) and stored[-1][1].suffix == ".webp"
    count = min(MOST_VIDEO_STEPS if videos else MOST_STEPS, len(stored))
    chosen = sorted({round(i * (len(stored) - 1) / max(1, count - 1)) for i in range(count)})
    shown = []
    for step, file in (stored[i] for i in chosen):
        rows = gallery.read(file, functools.partial(_rows, file, gallery))
        if rows:
            shown.append(ShownStep(step, rows))
    return shown


def _rows(file: Path, gallery: Gallery) -> list[tuple[str, Inlined]]:
    with _opened(file) as grid:
        rows = grid_rows(grid) or [GridRow("", *opened_frames(grid))]
    taken = [(row.prompt, gallery.take(row)) for row in rows]
    return [(prompt, picture) for prompt, picture in taken if picture is not None]
