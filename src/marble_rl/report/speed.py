"""Where the time of a run went, and how much memory it took."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from marble_rl.report.charts import Chart, stacked_bars
from marble_rl.report.run_data import RunData
from marble_rl.report.statistics import thinned
from marble_rl.report.wording import duration, memory
from marble_rl.runs.layout import wall_seconds

STAGES = {
    "rollout": "sampling",
    "rewards": "waiting for rewards",
    "gradients": "gradients",
    "coefficients": "coefficients",
    "update": "update",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
    "base_images": "base model's images",
}
"""`time/<stage>` that add up to a step; `time/scoring` runs beside them."""
STEP = ("rollout", "rewards", "gradients", "coefficients", "update")
"""Stages of the step itself."""


@dataclass(frozen=True)
class Speed:
    """Where the time went."""

    charts: list[Chart]
    stages: list[tuple[str, str, str, float]]
    """Name, colour, seconds in words, share of the whole"""
    facts: list[tuple[str, str]]


def speed(run: RunData) -> Speed:
    known = [stage for stage in STAGES if run.series(f"time/{stage}")]
    if not known:
        return Speed([], [], [])
    steps = [int(line["step"]) + 1 for line in run.lines]
    bars, stages = [], []
    total = total_seconds(run)
    for stage in known:
        colour = f"s{list(STAGES).index(stage)}"
        x, seconds = thinned(steps, [line.get(f"time/{stage}", 0.0) for line in run.lines])
        bars.append((STAGES[stage], colour, seconds))
        spent = run.total(f"time/{stage}")
        stages.append((STAGES[stage], colour, duration(spent), spent / total if total else 0.0))
    chart = stacked_bars("Seconds a step", x, bars, note="Wall clock, by stage.")
    return Speed([chart], stages, _speed_facts(run))


def total_seconds(run: RunData) -> float:
    """Of all logged stages."""
    return math.fsum(wall_seconds(line) for line in run.lines)


def _speed_facts(run: RunData) -> list[tuple[str, str]]:
    c = run.config
    per_step = [math.fsum(line.get(f"time/{stage}", 0.0) for stage in STEP) for line in run.lines]
    facts = [
        ("a step, median", duration(statistics.median(per_step))),
        ("images a rollout", str(c.rollout.groups * c.rollout.group_size)),
    ]
    refreshes = [line["time/gradients"] for line in run.lines if "qp/norm" in line and "time/gradients" in line]
    others = [line["time/gradients"] for line in run.lines if "qp/norm" not in line and "time/gradients" in line]
    if refreshes and others and statistics.median(others) > 0:
        ratio = statistics.median(refreshes) / statistics.median(others)
        facts.append(("gradients of a refresh, against other steps", f"{ratio:.1f} times as long"))
    evaluations = run.series("evaluation/images").values
    if evaluations and (spent := run.total("time/evaluate")):
        each = f"{len(evaluations)} of {evaluations[-1]:.0f} images, {duration(spent / len(evaluations))} each"
        facts.append(("evaluations during training", f"{each}: {100 * spent / total_seconds(run):.0f} % of the time"))
    if peak := run.series("memory/peak_mb").values:
        facts.append(("memory at the highest point", memory(max(peak))))
    scoring = run.total("time/scoring")
    if scoring:
        facts.append(("rewards at work, beside sampling", duration(scoring)))
    for name, series in run.by_reward("time/reward", (*run.trained, *run.held_out)).items():
        facts.append((f"one call of {name}, mean", duration(statistics.fmean(series.values))))
    return facts
