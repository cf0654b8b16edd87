"""Text rendering: what the rewards that read text in pictures have in common.

That is the text wanted, where in the picture it is looked for, and the score of what was read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator

from marble_rl.prompts.wanted import wanted_text
from marble_rl.rewards.core.base import Images, NotedScore, RewardBase, RewardBatch, Traits
from marble_rl.section import Fraction, Section
from marble_rl.types import Prompt

Mode = Literal["auto", "line", "page"]
Match = Literal["auto", "whole", "contained"]
PAGE_SIDE = 128
"""Shorter side, in pixels, from which `auto` looks for text anywhere. In smaller pictures one line fills the region."""


def edit_distance(extra: str = "ocr") -> Callable[[str, str], int]:
    """Levenshtein's distance. Rewards ask for it while they load, so that a missing package is reported early."""
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


Region = tuple[Fraction, Fraction, Fraction, Fraction]


def _not_empty(region: Region) -> Region:
    left, top, right, bottom = region
    if left >= right or top >= bottom:
        raise ValueError(f"expected [left, top, right, bottom] of a part of the picture, got {list(region)}")
    return region


class TextRenderingParams(Section):
    """What all rewards that read text take."""

    region: Annotated[Region, AfterValidator(_not_empty)] = (0.0, 0.0, 1.0, 1.0)
    """[left, top, right, bottom] of the part that is read, each between 0 and 1."""
    mode: Mode = "auto"
    """`line`: the region is one line of text. `page`: lines are looked for anywhere in it. `auto`: `page` if the
    region's shorter side has 128 pixels or more."""
    match: Match = "auto"
    """`whole`: all that was read is compared. `contained`: the neighbouring words that fit best. `auto`: `contained`
    for a page, `whole` for a line."""


class TextRenderingReward(RewardBase, ABC):
    """Scores the text that is read in (a region of) each picture."""

    Params: type[TextRenderingParams] = TextRenderingParams
    traits = Traits(range=(0.0, 1.0), deterministic=True, device="cpu")

    def applies_to(self, prompt: Prompt) -> bool:
        return bool("".join((wanted_text(prompt) or "").split()))

    def score(self, batch: RewardBatch) -> Sequence[float]:
        images = self._cropped(batch.images)
        match = self.params.match
        if match == "auto":
            match = "contained" if self.are_pages(images) else "whole"
        return [
            NotedScore(SCORES[match](text, wanted_text(prompt) or ""), f'read "{text}"' if text else "read no text")
            for text, prompt in zip(self.read(images), batch.prompts, strict=True)
        ]

    def are_pages(self, images: Images) -> bool:
        """Whether lines are looked for in the pictures, or each is one line."""
        mode = self.params.mode
        return bool(mode == "page" or (mode == "auto" and min(images.shape[1:3]) >= PAGE_SIDE))

    def read(self, images: Images) -> list[str]:
        """The text in each picture, empty where there is none."""
        return self.read_pages(images) if self.are_pages(images) else self.read_lines(images)

    @abstractmethod
    def read_lines(self, images: Images) -> list[str]:
        """The one line of text that each picture is."""

    @abstractmethod
    def read_pages(self, images: Images) -> list[str]:
        """All lines of text in each picture, from top to bottom, with spaces between."""

    def _cropped(self, images: Images) -> Images:
        height, width = images.shape[1:3]
        left, top, right, bottom = self.params.region
        return images[:, _pixels(top, bottom, height), _pixels(left, right, width)]


def _pixels(low: float, high: float, size: int) -> slice:
    """From one edge to the other, at least one pixel."""
    start = min(round(low * size), size - 1)
    return slice(start, max(round(high * size), start + 1))
