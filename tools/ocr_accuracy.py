"""Accuracy and speed of the OCR rewards: `python -m tools.ocr_accuracy`.

Phrases of one to four words are drawn at 512x512, in varying sizes, places and colours. Each picture is scored for its
own phrase and for one that shares no word with it. The first score should be near 1, the second near 0.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

from marble_rl.rewards.builtin.ocr import DETECTION_SIDE, Ocr
from marble_rl.rewards.builtin.tesseract import Tesseract
from marble_rl.rewards.builtin.text_rendering import TextRenderingReward
from marble_rl.rewards.core.base import Images, RewardBatch
from marble_rl.types import Prompt

SIDE = 512
MARGIN = 16
BATCH = 10
WORDS = """
amber anchor apple autumn bakery basket blue bridge canyon castle cedar chapter cloud coffee copper corner crystal dream
eagle engine falcon forest garden ghost glacier golden harbor hidden honey island jungle kettle lantern lemon library
magnet marble market meadow midnight mirror morning museum north ocean open orange palace pepper pilot planet pocket
quartz quick rabbit ranger ribbon river rocket saddle school secret shadow silver spring station summer sunset temple
theater thunder tiger tunnel velvet village violet voyage walnut welcome whisper window winter wizard yellow zebra
"""
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Reading:
    """Means over all pictures."""

    right: float
    """Score for the phrase that was drawn."""
    wrong: float
    """Score for another phrase."""
    images_per_second: float


def phrases(count: int, seed: int = 0) -> list[str]:
    """Phrases that differ even without regard to case. One in four words is a code."""
    dice, words = random.Random(seed), WORDS.split()
    distinct: dict[str, str] = {}
    while len(distinct) < count:
        cased = dice.choice([str.upper, str.lower, str.capitalize])
        text = " ".join(
            _code(dice) if dice.random() < 0.25 else cased(dice.choice(words)) for _ in range(dice.randint(1, 4))
        )
        distinct.setdefault(text.casefold(), text)
    return list(distinct.values())


def _code(dice: random.Random) -> str:
    """A code such as 40, 1987 or B52."""
    return dice.choice(["", dice.choice("ABCDEFGHJKLMNPRSTUVWXYZ")]) + str(dice.randint(10, 2999))


def others(texts: Sequence[str]) -> list[str]:
    """For each phrase, the next one that shares no word with it."""
    words = [set(text.casefold().split()) for text in texts]
    turned = [(*range(i + 1, len(texts)), *range(i)) for i in range(len(texts))]
    return [texts[next(k for k in turned[i] if not words[i] & words[k])] for i in range(len(texts))]


def picture(text: str, dice: random.Random, side: int = SIDE, letters: int | None = None) -> Image.Image:
    """Draw the phrase at a random place of a square picture; half of the phrases of several words on two lines.

    ``letters``: size of the font in pixels, by default 5 to 20 % of the side; smaller if the text would not fit.
    """
    words = text.split()
    split = dice.randint(1, len(words) - 1) if len(words) > 1 and dice.random() < 0.5 else len(words)
    lines = "\n".join(" ".join(part) for part in (words[:split], words[split:]) if part)
    ground, ink = _colours(dice)
    canvas = _ground(ground, dice, side)
    draw = ImageDraw.Draw(canvas)
    margin = side * MARGIN // SIDE
    size = letters or dice.uniform(0.05, 0.2) * side
    while True:
        font = ImageFont.load_default(size)
        left, top, right, bottom = draw.multiline_textbbox((0, 0), lines, font=font)
        if max(right - left, bottom - top) <= side - 2 * margin:
            break
        size *= 0.9
    x = dice.uniform(margin, side - margin - (right - left)) - left
    y = dice.uniform(margin, side - margin - (bottom - top)) - top
    draw.multiline_text((x, y), lines, font=font, fill=ink, align=dice.choice(["left", "center"]))
    return canvas


def _colours(dice: random.Random) -> tuple[Colour, Colour]:
    """Colours of the background and of the letters, whose brightness differs by a third of the scale or more."""
    while True:
        ground, ink = (tuple(dice.randint(0, 255) for _ in range(3)) for _ in range(2))
        if abs(_brightness(ground) - _brightness(ink)) > 85:
            return ground, ink  # type: ignore[return-value]


def _brightness(colour: Sequence[int]) -> float:
    return float(np.dot(colour, (0.299, 0.587, 0.114)))


def _ground(colour: Colour, dice: random.Random, side: int) -> Image.Image:
    """A background: plain, with a gradient of brightness, or with noise."""
    pixels = np.full((side, side, 3), colour, dtype=np.float64)
    kind = dice.choice(["plain", "shaded", "grained"])
    if kind == "shaded":
        pixels += np.linspace(-25, 25, side)[:, None, None] * dice.choice([-1, 1])
    elif kind == "grained":
        pixels += np.random.default_rng(dice.randrange(2**32)).normal(0, 6, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def drawn(texts: Sequence[str], seed: int = 0, side: int = SIDE, letters: int | None = None) -> Images:
    """[B, side, side, 3]"""
    dice = random.Random(seed)
    return np.stack([np.asarray(picture(text, dice, side, letters)) for text in texts])


def measure(
    reader: TextRenderingReward, count: int = 100, seed: int = 0, side: int = SIDE, letters: int | None = None
) -> Reading:
    """Measure a loaded reader. Speed is in CPU time, child processes of the reader included."""
    texts = phrases(count, seed)
    images = drawn(texts, seed, side, letters)
    wrong = mean_score(reader, images, others(texts))
    start = _cpu_seconds()
    right = mean_score(reader, images, texts)
    return Reading(right, wrong, count / (_cpu_seconds() - start))


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def mean_score(reader: TextRenderingReward, images: Images, wanted: Sequence[str]) -> float:
    prompts = [Prompt(i, f'a poster that says "{text}"', "bench") for i, text in enumerate(wanted)]
    scores: list[float] = []
    for start in range(0, len(images), BATCH):
        part = slice(start, start + BATCH)
        scores += reader.score(RewardBatch(images[part], prompts[part]))
    return float(np.mean(scores))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.ocr_accuracy", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="pictures")
    parser.add_argument("--side", type=int, default=SIDE, help="of a picture, in pixels")
    parser.add_argument("--letters", type=int, help="size of the font in pixels; default: varied")
    parser.add_argument("--detection-side", type=int, default=DETECTION_SIDE, help="of the ocr reward")
    given = parser.parse_args(arguments)
    if given.count < 10:
        parser.error(f"--count: {given.count} is too few to pair every phrase with another; give 10 or more")
    torch.set_num_threads(1)
    table = Table(
        "reader", "right", "wrong", "images/s, one thread", title=f"{given.count} phrases at {given.side}x{given.side}"
    )
    for name, reader in (("ocr", Ocr(detection_side=given.detection_side)), ("tesseract", Tesseract())):
        try:
            reader.load(torch.device("cpu"))
        except ImportError as error:
            table.add_row(name, str(error))
            continue
        reading = measure(reader, given.count, side=given.side, letters=given.letters)
        table.add_row(name, f"{reading.right:.3f}", f"{reading.wrong:.3f}", f"{reading.images_per_second:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
