"""What every reward that reads text has in common: the text wanted, and how well it was met."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from marble_rl.errors import InputError
from marble_rl.rewards.base import Images, RewardBase, RewardBatch
from marble_rl.types import Prompt

QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|\u2018(.+?)\u2019(?!\w)|(?<!\w)'(.+?)'(?!\w)")
"""Text in quotes of four kinds. An apostrophe within or after a word is none."""


def wanted_text(prompt: Prompt) -> str | None:
    """``target`` of the prompt's metadata, otherwise what stands in quotes in it; None where there is neither."""
    target = prompt.metadata.get("target")
    if target is not None:
        return str(target)
    quoted = ["".join(groups) for groups in QUOTED.findall(prompt.text)]
    return " ".join(quoted) or None


def edit_distance(extra: str = "ocr") -> Callable[[str, str], int]:
    """Levenshtein's distance. Readers ask for it while they load, so that a missing package is found early."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise ImportError(f"rapidfuzz is not installed; run: pip install 'marble-rl[{extra}]'") from error
    return Levenshtein.distance


def reading_score(read: str, wanted: str) -> float:
    """1 - edit distance / length of the text wanted, at least 0. Case and white space do not count."""
    read, wanted = ("".join(text.casefold().split()) for text in (read, wanted))
    return max(0.0, 1.0 - edit_distance()(read, wanted) / len(wanted))


class ReadingReward(RewardBase, ABC):
    """Scores by `reading_score` what `read` finds in (a region of) each picture."""

    def __init__(self, region: Sequence[float] = (0.0, 0.0, 1.0, 1.0)) -> None:
        try:
            left, top, right, bottom = (float(edge) for edge in region)
            fits = 0 <= left < right <= 1 and 0 <= top < bottom <= 1
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise InputError(
                f"region: {region} is not a part of the picture; give [left, top, right, bottom] between 0 and 1"
            )
        self.region = (left, top, right, bottom)

    def applies_to(self, prompt: Prompt) -> bool:
        return bool("".join((wanted_text(prompt) or "").split()))

    def score(self, batch: RewardBatch) -> Sequence[float]:
        texts = self.read(self._cropped(batch.images))
        return [
            reading_score(text, wanted_text(prompt) or "") for text, prompt in zip(texts, batch.prompts, strict=True)
        ]

    @abstractmethod
    def read(self, images: Images) -> list[str]:
        """The text in each picture, empty where there is none."""

    def _cropped(self, images: Images) -> Images:
        height, width = images.shape[1:3]
        left, top, right, bottom = self.region
        return images[:, _pixels(top, bottom, height), _pixels(left, right, width)]


def _pixels(low: float, high: float, size: int) -> slice:
    """From one edge to the other, at least one pixel."""
    start = min(round(low * size), size - 1)
    return slice(start, max(round(high * size), start + 1))
