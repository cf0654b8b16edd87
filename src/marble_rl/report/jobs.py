"""The jobs behind a comparison, as far as their folders are still there: curves, memory, pictures and the config."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marble_rl.charts.drawing import Line
from marble_rl.compare.job_result import JobResult
from marble_rl.compare.jobs import JOBS
from marble_rl.report.charts import Chart, line_chart
from marble_rl.report.evaluation import prompt_cards
from marble_rl.report.run_data import read_if_whole, read_metrics
from marble_rl.report.statistics import smooth, thinned
from marble_rl.report.wording import shortened
from marble_rl.runs.images import Card, Picture
from marble_rl.runs.scores import SCORES, Scores
from marble_rl.types import Metrics

MOST_METHODS = 6
"""In curves and pictures, where more would hide each other."""
MOST_PROMPTS = 8


@dataclass(frozen=True)
class FinishedJob:
    """One seed of one method."""

    result: JobResult
    folder: Path
    lines: list[Metrics]
    """Of its run; empty where it left none, or its folder was removed"""


def read_jobs(folder: Path, remarks: list[str]) -> list[FinishedJob]:
    """Those that finished. A damaged result is left out with a remark: the table does not depend on it."""
    jobs = []
    for file in sorted((folder / JOBS).glob("*.json")):
        result = read_if_whole(JobResult, file, remarks)
        if result is not None and result.failed is None:
            metrics = file.with_suffix("") / "run" / "metrics.jsonl"
            jobs.append(
                FinishedJob(result, file.with_suffix(""), read_metrics(metrics, []) if metrics.exists() else [])
            )
    return jobs


def shown_methods(methods: Sequence[str], against: str | None) -> list[str]:
    """In the order of the table; where there are too many, the first ones beside those that matter most."""
    first = [name for name in ("base", against, "marble") if name in methods]
    chosen = [*first, *(name for name in methods if name not in first)][:MOST_METHODS]
    return [name for name in methods if name in chosen]


def peak_memory(jobs: Sequence[FinishedJob]) -> dict[str, float]:
    """By method, in MiB: the highest of its seeds."""
    peaks: dict[str, float] = {}
    for job in jobs:
        for line in job.lines:
            peaks[job.result.method] = max(peaks.get(job.result.method, 0.0), line.get("memory/peak_mb", 0.0))
    return {method: peak for method, peak in peaks.items() if peak > 0}


def curves(
    jobs: Sequence[FinishedJob], methods: Sequence[str], rewards: Sequence[str], colour: dict[str, str]
) -> list[Chart]:
    """Of each reward during training: the mean over a method's seeds, smoothed, with its 95 % interval."""
    charts = []
    for reward in rewards:
        lines = []
        for method in methods:
            by_step: dict[int, list[float]] = {}
            for line in (line for job in jobs if job.result.method == method for line in job.lines):
                if f"reward/{reward}" in line:
                    by_step.setdefault(int(line["step"]) + 1, []).append(line[f"reward/{reward}"])
            if len(by_step) > 1:
                steps = sorted(by_step)
                means = [statistics.fmean(by_step[step]) for step in steps]
                x, y = thinned(steps, means)
                curve, band = smooth(x, y)
                lines.append(Line(method, x, curve, colour[method], shortened(method, 14), band=band))
        if lines:
            charts.append(line_chart(reward, lines))
    return charts


def pictures(jobs: Sequence[FinishedJob], methods: Sequence[str]) -> tuple[int | None, list[Card[Path]]]:
    """A seed that all of these methods have, and prompts with a picture of each: the same prompt and the same noise."""
    seeds = [{job.result.seed for job in jobs if job.result.method == method} for method in methods]
    common = sorted(set.intersection(*seeds)) if seeds else []
    if not common:
        return None, []
    by_prompt: dict[tuple[str, str], list[Picture[Path]]] = {}
    for method in methods:
        job = next(job for job in jobs if (job.result.method, job.result.seed) == (method, common[0]))
        evaluation = job.folder / "evaluation"
        scores = read_if_whole(Scores, evaluation / SCORES, [])
        for card in () if scores is None else prompt_cards(scores, evaluation):
            last = replace(card.pictures[-1], label=method)
            by_prompt.setdefault((card.source, card.prompt), []).append(last)
    return common[0], spread_cards([Card(text, tuple(shown), source) for (source, text), shown in by_prompt.items()])


def spread_cards(cards: Sequence[Card[Path]]) -> list[Card[Path]]:
    """At most `MOST_PROMPTS`, from every source in turn."""
    place: dict[str, int] = {}
    ranked = []
    for card in cards:
        place[card.source] = place.get(card.source, 0) + 1
        ranked.append((place[card.source], card))
    return [card for _, card in sorted(ranked, key=lambda pair: pair[0])[:MOST_PROMPTS]]
