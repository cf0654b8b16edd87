"""The gallery of a run's page: every picture that the evaluation kept, to be filtered, sorted, searched and enlarged.

The script of the page draws it from this data (templates/gallery.js). The pictures are as large as their number allows.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marble_rl.errors import count_of
from marble_rl.intervals import DECIMALS
from marble_rl.report.evaluation import prompt_cards
from marble_rl.report.pictures import SIZES, Gallery, Inlined, shown_cards
from marble_rl.report.run_data import RunData
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.images import Card, Picture
from marble_rl.runs.scores import IMAGES, Scores

BUDGET = 6_000_000
"""Bytes of the gallery: with 2 MB of other pictures and about 1 MB of charts the page stays below 10 MB."""
MOST_REMARKS = 3
MARKED = 0.1
"""Share of the unit from which a change counts as one."""


@dataclass(frozen=True)
class GalleryReward:
    """A reward by which the gallery can be sorted."""

    name: str
    colour: str
    unit: float
    """Standard deviation of the scores of all pictures: changes of rewards with other scales are compared in it"""
    least: float
    """From here on a change is marked"""


@dataclass(frozen=True)
class PromptGallery:
    """What the script of the page gets, and how to get pictures of all prompts where some are missing."""

    rewards: list[GalleryReward]
    cards: list[Card[Inlined]]
    shown: str
    missing: str
    """Command that keeps the pictures of all prompts; empty if it was called"""
    beside: str
    """Where the files are in full size, seen from the page"""

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(card.source for card in self.cards))

    @property
    def weights(self) -> list[str]:
        return list(dict.fromkeys(picture.label for card in self.cards for picture in card.pictures))

    @property
    def moves(self) -> bool:
        return any(picture.image.video for card in self.cards for picture in card.pictures)

    @property
    def data(self) -> dict[str, Any]:
        rewards, cards = [asdict(reward) for reward in self.rewards], [_entry(card) for card in self.cards]
        return {"beside": self.beside, "rewards": rewards, "cards": cards}


def prompt_gallery(
    run: RunData, page_folder: Path, colours: Mapping[str, str], remarks: list[str]
) -> PromptGallery | None:
    """None where the run was not evaluated."""
    folder = RunFolder(run.folder).evaluation
    scores = run.evaluation
    if scores is None:
        return None
    cards = prompt_cards(scores, folder)
    text = sum(len(json.dumps(card.prompt)) + 300 * len(card.pictures) for card in cards)
    own: list[str] = []
    room = Gallery(own, left=max(0, BUDGET - text))
    shown = shown_cards(cards, room, SIZES[0][0])
    remarks += own[:MOST_REMARKS]
    if len(own) > MOST_REMARKS:
        remarks.append(f"{count_of(len(own) - MOST_REMARKS, 'more picture')} could not be shown.")
    count = f"{len(shown)} of {count_of(scores.prompts, 'prompt')}"
    missing = "" if scores.keeps_every_prompt else evaluate_command(run, save_images=True)
    beside = os.path.relpath(folder / IMAGES, page_folder).replace(os.sep, "/")
    return PromptGallery(_rewards(scores, cards, colours), shown, count, missing, beside)


def evaluate_command(run: RunData, *, save_images: bool) -> str:
    return f"marble evaluate {shlex.quote(str(run.folder))}{' --save-images' if save_images else ''}"


def _rewards(scores: Scores, cards: Sequence[Card[Path]], colours: Mapping[str, str]) -> list[GalleryReward]:
    rewards = []
    for name in scores.rewards:
        values = [picture.scores[name] for card in cards for picture in card.pictures if name in picture.scores]
        if values:
            unit = statistics.pstdev(values)
            least = max(MARKED * unit, 0.5 * 10**-DECIMALS)
            rewards.append(GalleryReward(name, colours.get(name, "ink"), unit, least))
    return rewards


def _entry(card: Card[Inlined]) -> dict[str, Any]:
    return {"prompt": card.prompt, "source": card.source, "pictures": [_shot(picture) for picture in card.pictures]}


def _shot(picture: Picture[Inlined]) -> dict[str, Any]:
    scores = {name: float(f"{score:.6g}") for name, score in picture.scores.items()}
    return {"label": picture.label, "image": asdict(picture.image), "scores": scores, "notes": dict(picture.notes)}
