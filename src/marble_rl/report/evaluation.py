"""What the pages show of an evaluation: gains in units of the scores' spread, and prompts with their pictures."""

from __future__ import annotations

import statistics
from pathlib import Path

from marble_rl.runs.images import Card, Picture
from marble_rl.runs.scores import IMAGES, ImageScores, Scores


def prompt_cards(scores: Scores, folder: Path) -> list[Card[Path]]:
    """Prompts whose pictures were kept in ``folder``, that of the evaluation."""
    cards = []
    for picture in scores.pictures:
        # A name only, so that scores.json from elsewhere cannot pull other files into a page that is passed on.
        files = {name: folder / IMAGES / Path(file).name for name, file in picture.files.items()}
        shown = [
            Picture(name, file, _known(scores.weights[name].images[picture.row]), picture.notes.get(name, {}))
            for name, file in files.items()
        ]
        image = scores.images[picture.row]
        if shown:
            cards.append(Card(image.prompt, tuple(shown), image.source))
    return cards


def score_spread(scores: Scores) -> dict[str, float]:
    """By reward, the standard deviation over prompts of the first weights' score: a unit to compare gains in."""
    by_reward: dict[str, dict[tuple[str, int], list[float]]] = {}
    for image in scores.images:
        for name, score in _known(image).items():
            by_reward.setdefault(name, {}).setdefault((image.source, image.index), []).append(score)
    per_prompt = {name: [statistics.fmean(s) for s in prompts.values()] for name, prompts in by_reward.items()}
    return {name: statistics.stdev(means) for name, means in per_prompt.items() if len(means) > 1}


def gains_by_source(scores: Scores) -> dict[str, dict[str, float]]:
    """By prompt source, then by reward that applies there: the last weights' mean minus the first's, in spreads. Empty
    where there is only one set of weights."""
    if len(scores.weights) == 1:
        return {}
    spread = score_spread(scores)
    changes: dict[str, dict[str, list[float]]] = {}
    for before, after in zip(scores.images, scores.weights[scores.after].images, strict=True):
        of_source, later = changes.setdefault(before.source, {}), _known(after)
        for name, score in _known(before).items():
            if name in later and spread.get(name, 0) > 0:
                of_source.setdefault(name, []).append((later[name] - score) / spread[name])
    return {source: {n: statistics.fmean(values) for n, values in of.items()} for source, of in changes.items()}


def _known(image: ImageScores) -> dict[str, float]:
    """Of the rewards that apply to it."""
    return {name: score for name, score in image.scores.items() if score is not None}
