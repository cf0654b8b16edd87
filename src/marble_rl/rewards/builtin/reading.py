"""What every reward that reads text has in common: the text wanted, where it is looked for, how well it was met."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

from marble_rl.errors import InputError
from marble_rl.prompts.wanted import wanted_text
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Traits
from marble_rl.types import Prompt

Mode = Literal["auto", "line", "page"]
Match = Literal["auto", "whole", "contained"]
MODES = ("auto", "line", "page")
PAGE_SIDE = 128
"""`auto` looks for text anywhere from this shorter side on. In smaller pictures one line fills the region."""


def edit_distance(extra: str = "ocr") -> Callable[[str, str], int]:
    """Levenshtein's distance. Readers ask for it while they load, so that a missing package is found early."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise ImportError(f"rapidfuzz is not installed; run: pip install 'marble-rl[{extra}]'") from error
    return Levenshtein.distance


def reading_score(read: str, wanted: str) -> float:
    """1 - edit distance / length of the text wanted, at least 0. Case and white space do not count."""
    read, wanted = _bare(read), _bare(wanted)
    return max(0.0, 1.0 - edit_distance()(read, wanted) / len(wanted))


def contained_score(read: str, wanted: str) -> float:
    """`reading_score` of the neighbouring words that fit best: other text in the picture does not count.

    1 wherever the text wanted occurs in what was read, as in Flow-GRPO and DiffusionNFT. Where it does not, they
    compare with all that was read, so that one wrong letter beside other text costs everything; here it costs a letter.
    """
    if _bare(wanted) in _bare(read):
        return 1.0
    words, best = read.split(), 0.0
    for start in range(len(words)):
        run = ""
        for word in words[start:]:
            run += _bare(word)
            if len(run) >= 2 * len(_bare(wanted)):  # as many letters too many as are wanted: 0, however it goes on
                break
            best = max(best, reading_score(run, wanted))
    return best


def _bare(text: str) -> str:
    return "".join(text.casefold().split())


SCORES = {"whole": reading_score, "contained": contained_score}


class ReadingReward(RewardBase, ABC):
    """Scores what is read in (a region of) each picture.

    ``mode``: `line` takes the region for one line of text, `page` looks for lines anywhere in it, `auto` decides by the
    region's size. ``match``: `whole` compares all that was read, `contained` the part that fits best; `auto` is `whole`
    for a line and `contained` for a page.
    """

    traits = Traits(range=(0.0, 1.0), deterministic=True, device="cpu")

    def __init__(
        self, region: Sequence[float] = (0.0, 0.0, 1.0, 1.0), mode: Mode = "auto", match: Match = "auto"
    ) -> None:
        try:
            left, top, right, bottom = (float(edge) for edge in region)
            fits = 0 <= left < right <= 1 and 0 <= top < bottom <= 1
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise InputError(
                f"region: {region} is not a part of the picture; give [left, top, right, bottom] between 0 and 1"
            )
        for name, value, choices in (("mode", mode, MODES), ("match", match, ("auto", *SCORES))):
            if value not in choices:
                raise InputError(f"{name}: unknown {value!r}; use one of {', '.join(choices)}")
        self.region = (left, top, right, bottom)
        self.mode = mode
        self.match = match

    def applies_to(self, prompt: Prompt) -> bool:
        return bool("".join((wanted_text(prompt) or "").split()))

    def score(self, batch: RewardBatch) -> Sequence[float]:
        images = self._cropped(batch.images)
        match = self.match
        if match == "auto":
            match = "contained" if self.takes_for_pages(images) else "whole"
        return [
            SCORES[match](text, wanted_text(prompt) or "")
            for text, prompt in zip(self.read(images), batch.prompts, strict=True)
        ]

    def takes_for_pages(self, images: Images) -> bool:
        return self.mode == "page" or (self.mode == "auto" and min(images.shape[1:3]) >= PAGE_SIDE)

    def read(self, images: Images) -> list[str]:
        """The text in each picture, empty where there is none."""
        return self.read_pages(images) if self.takes_for_pages(images) else self.read_lines(images)

    @abstractmethod
    def read_lines(self, images: Images) -> list[str]:
        """The one line of text that each picture is."""

    @abstractmethod
    def read_pages(self, images: Images) -> list[str]:
        """All lines of text in each picture, from top to bottom, with spaces between."""

    def _cropped(self, images: Images) -> Images:
        height, width = images.shape[1:3]
        left, top, right, bottom = self.region
        return images[:, _pixels(top, bottom, height), _pixels(left, right, width)]


def _pixels(low: float, high: float, size: int) -> slice:
    """From one edge to the other, at least one pixel."""
    start = min(round(low * size), size - 1)
    return slice(start, max(round(high * size), start + 1))
