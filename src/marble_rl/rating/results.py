"""`marble rate results`: means, win rates, strengths and agreement, from the answers so far."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from marble_rl.errors import InputError
from marble_rl.rating.agreement import krippendorff_alpha
from marble_rl.rating.answers import Answer, Key
from marble_rl.rating.bradley_terry import strengths
from marble_rl.rating.crossed import UNKNOWN, Array, Estimate, crossed_mean
from marble_rl.rating.study import CRITERIA, HIGHEST, Ask, Criterion, Study
from marble_rl.storage import Maybe, Record

LOWEST = 1


class ModelFigures(BaseModel):
    """Of one model by one criterion."""

    model_config = ConfigDict(frozen=True)

    name: str
    mean: Estimate
    """Of its ratings from 1 to 5; unknown in a study of pairs"""
    win_rate: Estimate
    """Share of comparisons with other models that it won, ties half"""
    strength: Estimate
    """Bradley-Terry"""


class PairFigures(BaseModel):
    """Of two models by one criterion."""

    model_config = ConfigDict(frozen=True)

    model: str
    against: str
    difference: Estimate
    """Of their ratings, where one rater rated both for one prompt and seed; unknown in a study of pairs"""
    win_rate: Estimate
    """Of `model`, ties half"""
    comparisons: int


class CriterionFigures(BaseModel):
    """All figures by one criterion."""

    model_config = ConfigDict(frozen=True)

    criterion: Criterion
    answers: int
    agreement: Maybe
    """Krippendorff's alpha: ordinal for scales, nominal for pairs"""
    models: list[ModelFigures]
    pairs: list[PairFigures]
    notes: list[str]


class Results(Record):
    """What `marble rate results --json` prints."""

    kind: ClassVar[str] = "the results of a rating study"
    fix: ClassVar[str] = "Make them again with: marble rate results."

    ask: Ask
    prompts: int
    images: int
    raters: dict[str, int]
    """Answers by rater"""
    asked: int
    """Answers that a rater who is finished has given"""
    criteria: list[CriterionFigures]


@dataclass(frozen=True)
class Cells:
    """Answers by one criterion, summed by rater and prompt."""

    ratings: Array
    """[R, P, M] sums of ratings; zero in a study of pairs"""
    rated: Array
    """[R, P, M] their number"""
    wins: Array
    """[R, P, M, M] what the row's model won against the column's, ties half"""
    differences: Array
    """[R, P, M, M] sums of rating of the row's model minus that of the column's"""


def compute_results(study: Study, answers: Mapping[Key, Answer]) -> Results:
    _check(study, answers)
    pairs = len(study.models) * (len(study.models) - 1) // 2
    each = pairs if study.ask == "pairs" else len(study.models)
    raters = sorted({key.rater for key in answers})
    return Results(
        ask=study.ask,
        prompts=len(study.prompts),
        images=study.images,
        raters={rater: sum(key.rater == rater for key in answers) for rater in raters},
        asked=len(CRITERIA) * each * len(study.prompts) * study.images,
        criteria=[_figures(study, raters, answers, criterion) for criterion in CRITERIA],
    )


def _check(study: Study, answers: Mapping[Key, Answer]) -> None:
    names, pairs = set(study.names), study.ask == "pairs"
    for key in answers:
        known = key.model in names and (key.against in names if pairs else key.against is None)
        if not known or key.prompt not in range(len(study.prompts)) or key.image not in range(study.images):
            raise InputError(
                f"answers.jsonl has an answer to something that study.json does not ask ({key}); restore the file that "
                "belongs to it"
            )


def _figures(
    study: Study, raters: Sequence[str], answers: Mapping[Key, Answer], criterion: Criterion
) -> CriterionFigures:
    chosen = [answer for answer in answers.values() if answer.criterion == criterion]
    cells = _cells(study, raters, chosen)
    compared = cells.wins + cells.wins.swapaxes(2, 3)
    fitted = strengths(cells.wins, study.names)
    most = HIGHEST - LOWEST
    models = [
        ModelFigures(
            name=name,
            mean=crossed_mean(cells.ratings[..., m], cells.rated[..., m], LOWEST, HIGHEST),
            win_rate=crossed_mean(cells.wins[:, :, m].sum(axis=2), compared[:, :, m].sum(axis=2), 0, 1),
            strength=fitted.values[m],
        )
        for m, name in enumerate(study.names)
    ]
    pairs = [
        PairFigures(
            model=study.names[a],
            against=study.names[b],
            difference=UNKNOWN
            if study.ask == "pairs"
            else crossed_mean(cells.differences[..., a, b], compared[..., a, b], -most, most),
            win_rate=crossed_mean(cells.wins[..., a, b], compared[..., a, b], 0, 1),
            comparisons=int(compared[..., a, b].sum()),
        )
        for b, a in itertools.combinations(range(len(study.models)), 2)
    ]
    return CriterionFigures(
        criterion=criterion,
        answers=len(chosen),
        agreement=_agreement(study, chosen),
        models=models,
        pairs=pairs,
        notes=[fitted.reason] if chosen and fitted.reason else [],
    )


def _agreement(study: Study, answers: Sequence[Answer]) -> float | None:
    units: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for answer in answers:
        units[answer.prompt, answer.image, answer.model, answer.against].append(answer.value)
    return krippendorff_alpha(units.values(), "nominal" if study.ask == "pairs" else "ordinal")


def _cells(study: Study, raters: Sequence[str], answers: Sequence[Answer]) -> Cells:
    place = {name: m for m, name in enumerate(study.names)}
    row = {rater: r for r, rater in enumerate(raters)}
    shape = (len(raters), len(study.prompts), len(place))
    cells = Cells(np.zeros(shape), np.zeros(shape), np.zeros((*shape, len(place))), np.zeros((*shape, len(place))))
    together: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for answer in answers:
        r, p, m = row[answer.rater], answer.prompt, place[answer.model]
        if answer.against is not None:
            _count(cells, (r, p), m, place[answer.against], answer.value)
        else:
            cells.ratings[r, p, m] += answer.value
            cells.rated[r, p, m] += 1
            together[r, p, answer.image][m] = answer.value
    for (r, p, _), ratings in together.items():
        for (a, first), (b, second) in itertools.combinations(ratings.items(), 2):
            _count(cells, (r, p), a, b, (np.sign(first - second) + 1) / 2)
            cells.differences[r, p, a, b] += first - second
            cells.differences[r, p, b, a] += second - first
    return cells


def _count(cells: Cells, cell: tuple[int, int], a: int, b: int, score: float) -> None:
    cells.wins[(*cell, a, b)] += score
    cells.wins[(*cell, b, a)] += 1 - score
