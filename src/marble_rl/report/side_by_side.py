"""The page of several runs side by side: scores, learning curves, pictures of the same prompts, other settings."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marble_rl.charts.drawing import Line
from marble_rl.charts.style import PALETTE
from marble_rl.compare.methods import BASE
from marble_rl.compare.side_by_side import ONE_EACH, SEEDS, Difference, SideBySide, notes, read_runs, side_by_side
from marble_rl.intervals import Interval
from marble_rl.report.charts import Chart, forest, line_chart
from marble_rl.report.evaluation import prompt_cards
from marble_rl.report.jobs import spread_cards
from marble_rl.report.page import render
from marble_rl.report.pictures import Gallery, least_changes, shown_cards
from marble_rl.report.run_data import RunData, read_run
from marble_rl.report.statistics import smooth, thinned
from marble_rl.report.verdicts import Verdict
from marble_rl.report.wording import counted, duration, interval, listed, number, shortened
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.images import Card
from marble_rl.runs.layout import wall_seconds

LEAST_POINTS = 2
"""Of a curve."""
LONG = 180.0
"""Seconds from which on a chart counts minutes."""


def side_by_side_page(folders: Sequence[Path]) -> str:
    compared = side_by_side(read_runs(folders))
    runs = {run.name: read_run(run.folder) for run in compared.runs}
    remarks = [f"{name}: {remark}" for name, run in runs.items() for remark in run.remarks]
    colour = {name: f"r{i % PALETTE}" for i, name in enumerate(runs)}
    cards = _cards(runs)
    trained = dict.fromkeys(name for run in runs.values() for name in (*run.trained, *run.held_out))
    return render(
        "side_by_side.html.j2",
        title=" · ".join(runs),
        heading=f"{counted(len(runs), 'run').capitalize()} side by side",
        one_each=f"{ONE_EACH[0].upper()}{ONE_EACH[1:]}; {SEEDS}.",
        notes=notes(compared)[1:],
        verdicts=[_verdict(compared, difference) for difference in compared.differences],
        compared=compared,
        colours=colour,
        scores=_scores(compared, colour),
        rows=_rows(compared),
        by_step=_curves(runs, trained, colour),
        by_time=_curves(runs, trained, colour, _clock(runs)),
        cards=shown_cards(cards, Gallery(remarks)),
        least=least_changes(cards),
        facts={name: _facts(run) for name, run in runs.items()},
        remarks=remarks,
        refresh_seconds=None,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _verdict(compared: SideBySide, difference: Difference) -> Verdict:
    """Always open: one training of each cannot tell the settings from the seed."""
    first = compared.first.name
    texts = [
        f"{word} {listed(names)}"
        for word, sign in (("higher on", 1), ("lower on", -1))
        if (names := difference.changed(sign))
    ]
    if not difference.by_reward:
        texts = ["they were not evaluated on the same prompts" if not difference.prompts else "no reward in common"]
    text = "; ".join(texts or ["no reward differs beyond its interval"])
    figures = [f"{name} {_signed(d)}" for name, d in difference.by_reward.items()]
    sentence = f"{text[0].upper()}{text[1:]}. One training of each: another seed may differ."
    return Verdict(f"Is {difference.run} better than {first}?", "unknown", sentence, figures)


def _scores(compared: SideBySide, colour: dict[str, str]) -> list[Chart]:
    charts = []
    for reward in compared.rewards:
        rows = [(name, means[reward], colour[name]) for name, means in compared.means.items() if reward in means]
        charts.append(forest(f"{reward} (held out)" if reward in compared.held_out else reward, rows))
    return charts


def _rows(compared: SideBySide) -> list[tuple[str, list[str]]]:
    """Of the table: a reward, its mean in the base model and in each run, and each difference with its interval."""
    rows = []
    for reward in compared.rewards:
        cells = [number(compared.base[reward]) if reward in compared.base else ""] if compared.base else []
        for run in compared.runs:
            figure = compared.means.get(run.name, {}).get(reward)
            cells.append("" if figure is None else f"{number(figure.mean)}{_half(figure)}")
        for difference in compared.differences:
            d = difference.by_reward.get(reward)
            cells.append("" if d is None else _signed(d))
        rows.append((reward, cells))
    return rows


def _half(figure: Interval) -> str:
    return "" if figure.over == "nothing" else f" ±{number(figure.half_width)}"


def _signed(difference: Interval) -> str:
    ends = "one prompt, no interval" if difference.over == "nothing" else interval(difference)
    return f"{number(difference.mean, signed=True)} ({ends})"


@dataclass(frozen=True)
class _Clock:
    """When a step of a run was done, in seconds or minutes of training; breaks between two processes do not count."""

    unit: str
    by_run: dict[str, dict[int, float]]


def _clock(runs: Mapping[str, RunData]) -> _Clock:
    seconds = {name: list(itertools.accumulate(map(wall_seconds, run.lines))) for name, run in runs.items()}
    longest = max((done[-1] for done in seconds.values() if done), default=0.0)
    unit, size = ("minute", 60.0) if longest >= LONG else ("second", 1.0)
    return _Clock(
        unit,
        {
            name: {int(line["step"]) + 1: done / size for line, done in zip(run.lines, seconds[name], strict=True)}
            for name, run in runs.items()
        },
    )


def _curves(
    runs: Mapping[str, RunData], rewards: Iterable[str], colour: Mapping[str, str], clock: _Clock | None = None
) -> list[Chart]:
    """Of each reward during training, smoothed over steps, with its 95 % interval; by step, or by a clock."""
    charts = []
    for reward in rewards:
        lines = []
        for name, run in runs.items():
            series = run.series(f"reward/{reward}") or run.series(f"watch/{reward}")
            if len(series.steps) < LEAST_POINTS:
                continue
            x, y = thinned(series.steps, series.values)
            curve, band = smooth(x, y)
            if clock is not None:
                x, _ = thinned([clock.by_run[name][step] for step in series.steps], series.values)
            lines.append(Line(name, x, curve, colour[name], shortened(name, 14), band=band))
        if lines:
            charts.append(line_chart(reward, lines, small=True, x_label="step" if clock is None else clock.unit))
    return charts


def _cards(runs: dict[str, RunData]) -> list[Card[Path]]:
    """Prompts with a picture of every run: the last weights of each, after the base model's where the first has it."""
    of_runs = {name: _kept(run) for name, run in runs.items()}
    first, *others = of_runs.values()
    cards = []
    for key, card in first.items():
        if all(key in other for other in others):
            before = [picture for picture in card.pictures if picture.label == BASE][:1]
            last = [replace(cards_of[key].pictures[-1], label=name) for name, cards_of in of_runs.items()]
            cards.append(Card(card.prompt, (*before, *last), card.source))
    return spread_cards(cards)


def _kept(run: RunData) -> dict[tuple[str, str], Card[Path]]:
    if run.evaluation is None:
        return {}
    cards = prompt_cards(run.evaluation, RunFolder(run.folder).evaluation)
    return {(card.source, card.prompt): card for card in cards}


def _facts(run: RunData) -> str:
    done = f"{run.steps_done} of {run.config.trainer.steps} steps"
    seconds = sum(map(wall_seconds, run.lines))
    return f"{run.folder}: {done}{f' in {duration(seconds)}' if seconds else ''}, seed {run.config.trainer.seed}"
