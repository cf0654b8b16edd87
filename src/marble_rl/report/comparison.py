"""The page of a comparison, from compare.json and the results of its jobs (docs/compare.md)."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from marble_rl.charts.drawing import Line
from marble_rl.charts.style import PALETTE
from marble_rl.compare.jobs import JOBS
from marble_rl.compare.shares import MEAN, WORST
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import COMPARISON, Comparison, Row
from marble_rl.compare.time_to_score_table import time_to_score_tables
from marble_rl.compare.writing import HARMONY, share_notes
from marble_rl.errors import InputError, count_of
from marble_rl.report.charts import Chart, forest, line_chart
from marble_rl.report.jobs import curves, peak_memory, pictures, read_jobs, shown_methods
from marble_rl.report.page import render
from marble_rl.report.pictures import Gallery, least_changes, shown_cards
from marble_rl.report.verdicts import Answer, Verdict
from marble_rl.report.wording import count_word, counted, duration, interval, listed, memory, number


class NothingYet(InputError):
    """There is nothing to report on yet: no run, or a comparison of which no job has ended."""


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
    return render(
        "comparison.html.j2",
        title=folder.resolve().name,
        heading=_heading(comparison),
        comparison=comparison,
        same=_same(comparison),
        best=_best(comparison),
        share_notes=share_notes(comparison),
        verdicts=_verdicts(comparison),
        colours=colour,
        charts=_charts(comparison, colour),
        curves=curves(jobs, shown, comparison.trained, colour),
        learning=_learning(comparison, colour),
        to_score=time_to_score_tables(comparison),
        shown=shown,
        cards=shown_cards(prompts, Gallery(remarks)),
        least=least_changes(prompts),
        seed=seed,
        remarks=remarks,
        harmony=_harmony(comparison),
        memory={name: memory(peak) for name, peak in peak_memory(jobs).items()},
        prompts=f"{comparison.prompts_are} prompts",
        evaluated=count_of(comparison.prompts, f"{comparison.prompts_are} prompt"),
        images=count_of(comparison.images_per_prompt, "image"),
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


def _heading(comparison: Comparison) -> str:
    crashed = len(comparison.wholly_crashed)
    methods = counted(len(comparison.rows) + crashed, "method").capitalize()
    holes = f" ({count_word(crashed)} crashed)" if crashed else ""
    return f"{methods}{holes}, {counted(len(comparison.rewards), 'reward')}"


def _best(comparison: Comparison) -> dict[str, float]:
    """The highest mean of each column."""
    rows = comparison.rows
    return {n: max(row.figures[n].mean for row in rows if n in row.figures) for n in comparison.columns}


def _verdicts(comparison: Comparison) -> list[Verdict]:
    """Each method against the one compared with: by the worst share where both have one, else by the rewards."""
    verdicts = []
    for row in comparison.rows:
        known = {name: d for name, d in row.differences.items() if name in comparison.rewards}
        if not known:
            continue
        better = [name for name, d in known.items() if d.sign > 0]
        worse = [name for name, d in known.items() if d.sign < 0]
        answer = _by_rewards(better, worse, comparison.trained)
        texts = [f"{word} {listed(names)}" for word, names in (("better on", better), ("worse on", worse)) if names]
        if WORST in row.differences and row.differences[WORST].n != 1:
            answer, text = _by_worst_share(row, answer)
            texts = [text, *texts]
        elif not texts:
            texts = ["no reward differs beyond its interval"]
        shared_seeds = next(iter(known.values())).n or len(row.seeds)
        if shared_seeds == 1:
            answer, texts = "unknown", [*texts, "in one training of each: others may differ"]
        text = "; ".join(texts)
        figures = _figures(comparison, row, shared_seeds)
        claim = f"Is {row.method} better than {comparison.against}?"
        verdicts.append(Verdict(claim, answer, f"{text[0].upper()}{text[1:]}.", figures))
    return verdicts


def _by_rewards(better: list[str], worse: list[str], trained: list[str]) -> Answer:
    """Yes: every trained reward is better, and none is worse. Never by the composite."""
    if set(better) >= set(trained) and not worse:
        return "yes"
    return "partly" if better else "no" if worse else "unknown"


def _by_worst_share(row: Row, by_rewards: Answer) -> tuple[Answer, str]:
    """It decides where its interval leaves out 0; a mean share that is clearly lower makes a yes a partly."""
    worst, mean = row.differences[WORST], row.differences[MEAN]
    if worst.sign > 0:
        pays = mean.sign < 0
        return "partly" if pays else "yes", f"better by the worst share{', worse by the mean share' if pays else ''}"
    if worst.sign < 0:
        return "no", "worse by the worst share"
    return by_rewards, "no clear difference in the worst share"


def _figures(comparison: Comparison, row: Row, shared_seeds: int) -> list[str]:
    """Differences of the columns that summarise rewards, and what they rest on."""
    summaries = [name for name in (WORST, MEAN, COMPOSITE) if name in comparison.columns and name in row.differences]
    differences = {name: row.differences[name] for name in summaries}
    texts = [f"{name} {number(d.mean, signed=True)} ({interval(d)})" for name, d in differences.items()]
    only = ": the interval is over its prompts" if shared_seeds == 1 else ""
    return [*texts, f"{counted(shared_seeds, 'seed')}{only}"]


def _charts(comparison: Comparison, colour: dict[str, str]) -> list[Chart]:
    """One for each column; methods in the order of the table."""
    charts = []
    for name in comparison.columns:
        rows = [(row.method, row.figures[name], colour[row.method]) for row in comparison.rows if name in row.figures]
        title = f"{name} (held out)" if name in comparison.held_out else name
        charts.append(forest(title, rows))
    return charts


def _learning(comparison: Comparison, colour: dict[str, str]) -> list[Chart]:
    """Mean and worst share over the time of training."""
    rows = [row for row in comparison.rows if row.curve]
    if not rows:
        return []
    charts = []
    for title in (MEAN, WORST):
        which = title.split()[0]
        lines = [
            Line(
                row.method,
                [0.0, *(point.seconds for point in row.curve)],
                [0.0, *(getattr(point, which) for point in row.curve)],
                colour[row.method],
            )
            for row in rows
        ]
        charts.append(line_chart(title.capitalize(), lines, x_label=f"{comparison.clock} seconds"))
    return charts


def _harmony(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Means over the refreshes of the methods that have any."""
    rows = [row for row in comparison.rows if "heldout/min_cos" in row.training]
    return [(row.method, [number(row.training[k]) if k in row.training else "" for k in HARMONY]) for row in rows]
