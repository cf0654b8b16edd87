"""The page of a comparison, from compare.json and the results of its jobs (docs/compare.md)."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from marble_rl.charts.style import PALETTE
from marble_rl.compare.jobs import JOBS
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import COMPARISON, Comparison
from marble_rl.compare.writing import HARMONY
from marble_rl.errors import InputError
from marble_rl.intervals import Interval
from marble_rl.report.charts import Chart, forest
from marble_rl.report.jobs import curves, peak_memory, pictures, read_jobs, shown_methods
from marble_rl.report.page import render
from marble_rl.report.pictures import Gallery, least_changes, shown_cards
from marble_rl.report.verdicts import Answer, Verdict
from marble_rl.report.wording import count_word, counted, duration, interval, listed, memory, number


class NothingYet(InputError):
    """A comparison of which no job has ended."""


def is_comparison(folder: Path) -> bool:
    """Also one that has only begun."""
    return (folder / COMPARISON).is_file() or (folder / JOBS).is_dir()


def read_comparison(folder: Path) -> Comparison:
    if not (folder / COMPARISON).exists():
        if any((folder / JOBS).glob("*.json")):
            raise InputError(f"{folder} has results and no table: make it by marble compare {folder} --table-only")
        raise NothingYet(f"{folder}: no job of this comparison has ended yet; look again later, or give --watch")
    return Comparison.read(folder / COMPARISON)


def comparison_page(folder: Path, *, refresh_seconds: int | None = None) -> str:
    comparison = read_comparison(folder)
    remarks = [
        f"{hole.method} seed {hole.seed}: {hole.stage} ended with exit code {hole.exit_code}: {hole.last_line}"
        for hole in comparison.holes
    ]
    jobs = read_jobs(folder, remarks)
    shown = shown_methods([row.method for row in comparison.rows], comparison.against)
    seed, prompts = pictures(jobs, shown)
    config = next((job for job in jobs if job.result.method == "marble"), jobs[0] if jobs else None)
    colour = {row.method: f"r{i % PALETTE}" for i, row in enumerate(comparison.rows)}
    trained = [name for name in comparison.rewards if name not in comparison.held_out]
    return render(
        "comparison.html.j2",
        title=folder.resolve().name,
        heading=_heading(comparison),
        comparison=comparison,
        same=_same(comparison),
        columns=_columns(comparison),
        best=_best(comparison),
        verdicts=_verdicts(comparison),
        colours=colour,
        charts=_charts(comparison, colour),
        curves=curves(jobs, shown, trained, colour),
        shown=shown,
        cards=shown_cards(prompts, Gallery(remarks)),
        least=least_changes(prompts),
        seed=seed,
        remarks=remarks,
        harmony=_harmony(comparison),
        memory={name: memory(peak) for name, peak in peak_memory(jobs).items()},
        prompts=f"{comparison.prompts_are} prompts",
        config=None if config is None else config.result,
        config_text="" if config is None else yaml.safe_dump(config.result.config, sort_keys=False, allow_unicode=True),
        minutes={row.method: duration(row.train_seconds) for row in comparison.rows if row.train_seconds},
        per_step={row.method: duration(row.seconds_per_step) for row in comparison.rows if row.seconds_per_step},
        refresh_seconds=refresh_seconds,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _same(comparison: Comparison) -> list[str]:
    """What all methods have in common; one that was not trained has no budget."""
    budgets = {(row.steps, row.images_per_step) for row in comparison.rows if row.train_seconds}
    seeds = {tuple(row.seeds) for row in comparison.rows}
    return [*(["budget"] if len(budgets) == 1 else []), *(["seeds"] if len(seeds) == 1 else [])]


def _columns(comparison: Comparison) -> list[str]:
    """The column that decides comes first."""
    return [COMPOSITE, *comparison.rewards]


def _heading(comparison: Comparison) -> str:
    crashed = len(comparison.wholly_crashed)
    methods = counted(len(comparison.rows) + crashed, "method").capitalize()
    holes = f" ({count_word(crashed)} crashed)" if crashed else ""
    return f"{methods}{holes}, {counted(len(comparison.rewards), 'reward')}"


def _best(comparison: Comparison) -> dict[str, float]:
    """The highest mean of each column."""
    return {name: max(row.figures[name].mean for row in comparison.rows) for name in comparison.columns}


def _verdicts(comparison: Comparison) -> list[Verdict]:
    """Each method against the one compared with. The composite decides; rewards that go another way are named."""
    verdicts = []
    for row in comparison.rows:
        known = {name: d for name, d in row.differences.items() if name in comparison.rewards}
        if not known:
            continue
        better = [name for name, d in known.items() if d.low > 0]
        worse = [name for name, d in known.items() if d.high < 0]
        composite = row.differences.get(COMPOSITE)
        answer, text = _by_composite(composite, partly=bool(better))
        shared_seeds = next(iter(known.values())).n or len(row.seeds)
        if shared_seeds == 1 and composite is not None:
            answer, text = "unknown", f"{text}, in one training of each: others may differ"
        parts = {"better on": better, "worse on": worse}
        text = "; ".join([text, *(f"{word} {listed(names)}" for word, names in parts.items() if names)]) + "."
        figures = (
            [] if composite is None else [f"composite {number(composite.mean, signed=True)} ({interval(composite)})"]
        )
        only = ": the interval is over its prompts" if shared_seeds == 1 else ""
        figures.append(f"{counted(shared_seeds, 'seed')}{only}")
        verdicts.append(Verdict(f"Is {row.method} better than {comparison.against}?", answer, text, figures))
    return verdicts


def _by_composite(difference: Interval | None, *, partly: bool) -> tuple[Answer, str]:
    """``partly``: it is better on some reward, which decides nothing against a composite that is open."""
    if difference is None:
        return "unknown", "The composite is not known: no prompt has a score of both from some reward"
    if difference.low > 0:
        return "yes", "Better by the composite"
    if difference.high < 0:
        return "no", "Worse by the composite"
    return "partly" if partly else "unknown", "No clear difference in the composite"


def _charts(comparison: Comparison, colour: dict[str, str]) -> list[Chart]:
    """One a column, the composite first; methods in the order of the table."""
    charts = []
    for name in _columns(comparison):
        rows = [(row.method, row.figures[name], colour[row.method]) for row in comparison.rows]
        title = f"{name} (held out)" if name in comparison.held_out else name
        charts.append(forest(title, rows))
    return charts


def _harmony(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Means over the refreshes of the methods that have any."""
    rows = [row for row in comparison.rows if "heldout/min_cos" in row.training]
    return [(row.method, [number(row.training[k]) if k in row.training else "" for k in HARMONY]) for row in rows]
