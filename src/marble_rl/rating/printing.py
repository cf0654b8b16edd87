"""The results of a study as tables, and as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marble_rl.rating.answers import Answer, Key
from marble_rl.rating.crossed import Estimate
from marble_rl.rating.results import CriterionFigures, Results
from marble_rl.rating.study import HIGHEST, Study, StudyFolder
from marble_rl.storage import storage_errors, write_bytes

QUESTIONS = {"alignment": "does the picture match the prompt", "quality": "how good does it look"}


def print_results(results: Results, console: Console) -> None:
    for figures in results.criteria:
        scale = f", 1 to {HIGHEST}" if results.ask == "scales" else ", pairs"
        console.print(
            f"\n[bold]{figures.criterion}[/bold]: {QUESTIONS[figures.criterion]}{scale}. Raters: "
            f"{len(results.raters)}, prompts: {results.prompts}, answers: {figures.answers}",
            soft_wrap=True,
        )
        console.print(_models(figures, results))
        console.print(_pairs(figures, results))
        metric = "ordinal" if results.ask == "scales" else "nominal"
        console.print(f"agreement between raters (Krippendorff's alpha, {metric}): {_number(figures.agreement)}")
        for note in figures.notes:
            console.print(note, markup=False, soft_wrap=True)
    _print_explanations(results, console)


def _models(figures: CriterionFigures, results: Results) -> Table:
    table = Table("model", box=SIMPLE_HEAD)
    for column in (*(["mean"] if results.ask == "scales" else []), "win rate", "strength"):
        table.add_column(column, justify="right", no_wrap=True)
    for model in figures.models:
        mean = [_cell(model.mean)] if results.ask == "scales" else []
        table.add_row(escape(model.name), *mean, _cell(model.win_rate), _cell(model.strength, signed=True))
    return table


def _pairs(figures: CriterionFigures, results: Results) -> Table:
    table = Table("pair", box=SIMPLE_HEAD)
    for column in (*(["difference"] if results.ask == "scales" else []), "win rate of the first"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for pair in figures.pairs:
        shown, middle = (pair.difference, 0.0) if results.ask == "scales" else (pair.win_rate, 0.5)
        difference = [_cell(pair.difference, signed=True)] if results.ask == "scales" else []
        verdict = {1: "[green]better", -1: "[red]worse", 0: ""}[_side(shown, middle)]
        table.add_row(escape(f"{pair.model} - {pair.against}"), *difference, _cell(pair.win_rate), verdict)
    return table


def _side(estimate: Estimate, middle: float) -> int:
    """1 or -1 if the whole interval lies above or below ``middle``."""
    if estimate.low is None or estimate.high is None:
        return 0
    return int(estimate.low > middle) - int(estimate.high < middle)


def _cell(estimate: Estimate, signed: bool = False) -> str:
    if estimate.value is None:
        return "?"
    interval = "?"
    if estimate.low is not None and estimate.high is not None:
        interval = f"{_number(estimate.low, signed)} .. {_number(estimate.high, signed)}"
    return f"{_number(estimate.value, signed)} ({interval})"


def _number(value: float | None, signed: bool = False) -> str:
    return "?" if value is None else f"{value:+.2f}" if signed else f"{value:.2f}"


def _print_explanations(results: Results, console: Console) -> None:
    over = "raters and prompts"
    if len(results.raters) == 1:
        over = "prompts only, because there is one rater, so they say nothing about others"
    elif results.prompts == 1:
        over = "raters only, because there is one prompt, so they say nothing about others"
    progress = ", ".join(f"{rater} {count} of {results.asked}" for rater, count in results.raters.items())
    lines = [
        f"in brackets: 95 % intervals over {over}; better and worse where one is all on one side",
        "win rate: share of comparisons won, ties half; strength: Bradley-Terry, log odds, their mean is 0",
        "?: cannot be estimated from these answers (docs/rating.md)",
        f"answers: {progress}",
    ]
    console.print("\n" + "\n".join(lines), style="dim", markup=False, soft_wrap=True)


def write_csv(results: Results, study: Study, answers: Mapping[Key, Answer], folder: StudyFolder) -> list[Path]:
    """Every figure, and every answer with its prompt, as tables for other programs."""
    figures = [
        (of.criterion, name, model, against, estimate.value, estimate.low, estimate.high)
        for of in results.criteria
        for name, model, against, estimate in _every(of)
    ]
    given = [
        (a.rater, a.criterion, a.prompt, a.image, study.prompts[a.prompt], a.model, a.against, a.value, a.time)
        for a in answers.values()
    ]
    _write(folder.figures_csv, ("criterion", "figure", "model", "against", "value", "low", "high"), figures)
    header = ("rater", "criterion", "prompt", "image", "text", "model", "against", "value", "time")
    _write(folder.answers_csv, header, given)
    return [folder.figures_csv, folder.answers_csv]


def _every(of: CriterionFigures) -> list[tuple[str, str, str, Estimate]]:
    by_model = [
        (name, model.name, "", estimate)
        for model in of.models
        for name, estimate in (("mean", model.mean), ("win_rate", model.win_rate), ("strength", model.strength))
    ]
    by_pair = [
        (name, pair.model, pair.against, estimate)
        for pair in of.pairs
        for name, estimate in (("difference", pair.difference), ("win_rate", pair.win_rate))
    ]
    return [*by_model, *by_pair, ("agreement", "", "", Estimate(value=of.agreement))]


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    with storage_errors(str(path), "print the results again"):
        write_bytes(path, text.getvalue().encode())
