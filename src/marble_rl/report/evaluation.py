"""What `marble evaluate` left in RUN/evaluation: scores.json, and since it keeps them, the pictures of its grid."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marble_rl.intervals import Difference
from marble_rl.report.lenient import UNREADABLE, numbers, spanned


@dataclass(frozen=True)
class Shot:
    """A picture made with one set of weights, and its scores."""

    weights: str
    file: Path
    scores: dict[str, float]


@dataclass(frozen=True)
class PromptCard:
    """Pictures of one prompt from the same noise, one for each of the weights."""

    prompt: str
    source: str
    shots: tuple[Shot, ...]


@dataclass(frozen=True)
class StoredEvaluation:
    """Scores of one or several sets of weights on the same prompts and seeds."""

    step: int | None
    held_out: frozenset[str]
    means: dict[str, dict[str, float]]
    """By weights, in the order asked for, then by reward"""
    differences: dict[str, Difference]
    """By reward, the last weights against the first; empty where there is only one"""
    spread: dict[str, float]
    """By reward, the standard deviation over prompts of the first weights' score: a unit to compare gains in"""
    prompts: int
    images: int
    cards: tuple[PromptCard, ...]
    grid: Path | None
    """The picture of older evaluations, which kept no others"""
    gains: dict[str, dict[str, float]] = field(default_factory=dict)
    """By prompt source, then by reward that applies there: the last weights' mean against the first's, in spreads"""

    @property
    def before(self) -> str:
        return next(iter(self.means))

    @property
    def after(self) -> str:
        return list(self.means)[-1]


def read_evaluation(folder: Path, remarks: list[str]) -> StoredEvaluation | None:
    """None, with a remark where there is something that cannot be read."""
    file = folder / "scores.json"
    if not file.exists():
        return None
    try:
        return _parse(json.loads(file.read_text(encoding="utf-8")), folder)
    except UNREADABLE as error:
        remarks.append(
            f"evaluation/scores.json is not what this version of marble writes ({type(error).__name__}: {error}); "
            "it was left out. Run marble evaluate again."
        )
        return None


def _parse(tree: dict[str, Any], folder: Path) -> StoredEvaluation:
    weights = tree["weights"]
    first, *_, last = [result["images"] for result in weights.values()] * (2 if len(weights) == 1 else 1)
    spread = _spread(first)
    grid = folder / "grid.png"
    return StoredEvaluation(
        step=tree["step"],
        held_out=frozenset(tree["held_out_rewards"]),
        means={name: numbers(result["means"]) for name, result in weights.items()},
        differences={
            name: found for name, entry in tree["differences"].items() if (found := spanned(entry)) is not None
        },
        spread=spread,
        prompts=len({(image["source"], image["index"]) for image in first}),
        images=len(first),
        cards=tuple(_card(entry, weights, folder) for entry in tree.get("pictures", []) if entry["files"]),
        grid=grid if grid.is_file() else None,
        gains=_gains(first, last, spread) if len(weights) > 1 else {},
    )


def _spread(images: list[dict[str, Any]]) -> dict[str, float]:
    by_reward: dict[str, dict[tuple[str, int], list[float]]] = {}
    for image in images:
        for name, score in numbers(image["scores"]).items():
            by_reward.setdefault(name, {}).setdefault((image["source"], image["index"]), []).append(score)
    per_prompt = {name: [statistics.fmean(s) for s in prompts.values()] for name, prompts in by_reward.items()}
    return {name: statistics.stdev(means) for name, means in per_prompt.items() if len(means) > 1}


def _gains(
    before: list[dict[str, Any]], after: list[dict[str, Any]], spread: dict[str, float]
) -> dict[str, dict[str, float]]:
    changes: dict[str, dict[str, list[float]]] = {}
    for one, other in zip(before, after, strict=True):
        known, later = changes.setdefault(str(one["source"]), {}), numbers(other["scores"])
        for name, score in numbers(one["scores"]).items():
            if name in later and spread.get(name, 0) > 0:
                known.setdefault(name, []).append((later[name] - score) / spread[name])
    return {source: {n: statistics.fmean(v) for n, v in found.items()} for source, found in changes.items()}


def _card(entry: dict[str, Any], weights: dict[str, Any], folder: Path) -> PromptCard:
    row = entry["row"]
    image = next(iter(weights.values()))["images"][row]
    # A name only, so that scores.json from elsewhere cannot pull other files into a page that is passed on.
    files = {name: folder / "images" / Path(file).name for name, file in entry["files"].items()}
    shots = [Shot(name, file, numbers(weights[name]["images"][row]["scores"])) for name, file in files.items()]
    return PromptCard(str(image["prompt"]), str(image["source"]), tuple(shots))
