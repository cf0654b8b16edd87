"""Pictures inside the page: small, in WebP, as data addresses, and together within a budget."""

from __future__ import annotations

import base64
import functools
import io
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from markupsafe import Markup
from PIL import Image, ImageSequence

from marble_rl.report.run_data import RunData
from marble_rl.runs.images import STILLS, Card, Picture, grid_rows
from marble_rl.storage import open_regular

T = TypeVar("T")
BUDGET = 2_000_000
"""Bytes of all pictures, encoded."""
WIDEST, STRIP = 320, 832
"""Largest width in pixels of one picture, and of a row of them."""
QUALITY = 82
"""Of WebP; 100 is the best"""
MOST_STEPS = 6
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

    def take(self, image: Image.Image, widest: int) -> Inlined | None:
        """None once a picture did not fit."""
        if self._full:
            return None
        return self._taken(_inlined(image, widest))

    def open(self, file: Path, widest: int, quality: int = QUALITY) -> Inlined | None:
        """A picture file, or three stills of an animation; None, with a remark, where it cannot be read."""
        return None if self._full else self.read(file, lambda: self._taken(inlined_file(file, widest, quality)))

    def _taken(self, picture: Inlined) -> Inlined | None:
        if len(picture.address) > self.left:
            self.remarks.append("Some pictures were left out to keep this page small.")
            self._full = True
            return None
        self.left -= len(picture.address)
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
        stills = _stills(image)
        if image.format == "WEBP" and stills.size == image.size and image.width <= widest and quality >= QUALITY:
            return _webp(file.read_bytes(), stills, file.name)  # compressed once is enough
    return _inlined(stills, widest, quality, file.name)


def _inlined(image: Image.Image, widest: int, quality: int = QUALITY, name: str = "") -> Inlined:
    if image.width > widest:
        image = image.resize((widest, max(1, round(image.height * widest / image.width))), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", quality=quality, method=4)
    return _webp(buffer.getvalue(), image, name)


def _webp(data: bytes, image: Image.Image, name: str) -> Inlined:
    return Inlined(Markup("data:image/webp;base64,") + base64.b64encode(data).decode(), *image.size, name)


def _stills(image: Image.Image) -> Image.Image:
    frames = getattr(image, "n_frames", 1)
    if frames == 1:
        return image.convert("RGB")
    chosen = [i * (frames - 1) // (STILLS - 1) for i in range(STILLS)]
    stills = [frame.convert("RGB") for i, frame in enumerate(ImageSequence.Iterator(image)) if i in chosen]
    strip = Image.new("RGB", (image.width * len(stills), image.height))
    for i, still in enumerate(stills):
        strip.paste(still, (i * image.width, 0))
    return strip


def shown_cards(
    cards: Sequence[Card[Path]], gallery: Gallery, widest: int = WIDEST, quality: int = QUALITY
) -> list[Card[Inlined]]:
    """The same cards with their pictures in the page; one of which none could be opened is left out."""
    shown = []
    for card in cards:
        opened = [(picture, gallery.open(picture.image, widest, quality)) for picture in card.pictures]
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
    """At most `MOST_STEPS` of the stored steps, evenly spaced, the first and the last among them."""
    stored = run.samples
    count = min(MOST_STEPS, len(stored))
    chosen = sorted({round(i * (len(stored) - 1) / max(1, count - 1)) for i in range(count)})
    shown = []
    for step, file in (stored[i] for i in chosen):
        rows = gallery.read(file, functools.partial(_rows, file, gallery))
        if rows:
            shown.append(ShownStep(step, rows))
    return shown


def _rows(file: Path, gallery: Gallery) -> list[tuple[str, Inlined]]:
    with _opened(file) as grid:
        rows = grid_rows(grid) or [("", grid.convert("RGB"))]
    taken = [(prompt, gallery.take(image, STRIP)) for prompt, image in rows]
    return [(prompt, picture) for prompt, picture in taken if picture is not None]
