"""What every reward that reads text has in common: the text wanted, and how well it was met."""

from __future__ import annotations

import re
from collections.abc import Sequence

from marble_rl.errors import InputError
from marble_rl.rewards.base import Images, RewardBase, RewardBatch
from marble_rl.types import Prompt

QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|'([^']+)'(?!\w)")


def wanted_text(prompt: Prompt) -> str | None:
    """``target`` of the prompt's metadata, otherwise what stands in quotes in it; None where there is neither."""
    target = prompt.metadata.get("target")
    if target is not None:
        return str(target)
    quoted = ["".join(groups) for groups in QUOTED.findall(prompt.text)]
    return " ".join(quoted) or None


def reading_score(read: str, wanted: str) -> float:
    """1 - edit distance / length of the text wanted, at least 0. Case and white space do not count."""
    from rapidfuzz.distance import Levenshtein

    read, wanted = ("".join(text.casefold().split()) for text in (read, wanted))
    return max(0.0, 1.0 - Levenshtein.distance(read, wanted) / len(wanted))


class ReadingReward(RewardBase):
    """Scores by `reading_score` what `read` finds in (a region of) each picture."""

    def __init__(self, region: Sequence[float] = (0.0, 0.0, 1.0, 1.0)) -> None:
        left, top, right, bottom = region if len(region) == 4 else (1.0, 1.0, 0.0, 0.0)
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise InputError(
                f"region: {list(region)} is not a part of the picture; give [left, top, right, bottom] between 0 and 1"
            )
        self.region = (left, top, right, bottom)

    def applies_to(self, prompt: Prompt) -> bool:
        return bool("".join((wanted_text(prompt) or "").split()))

    def score(self, batch: RewardBatch) -> Sequence[float]:
        texts = self.read(self._cropped(batch.images))
        return [
            reading_score(text, wanted_text(prompt) or "") for text, prompt in zip(texts, batch.prompts, strict=True)
        ]

    def read(self, images: Images) -> list[str]:
        """The text in each picture, empty where there is none."""
        raise NotImplementedError

    def _cropped(self, images: Images) -> Images:
        height, width = images.shape[1:3]
        left, top, right, bottom = self.region
        rows = slice(round(top * height), max(round(bottom * height), round(top * height) + 1))
        columns = slice(round(left * width), max(round(right * width), round(left * width) + 1))
        return images[:, rows, columns]
