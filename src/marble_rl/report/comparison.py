"""The page of a comparison: what `marble compare` wrote to DIR/compare.json (docs/compare.md says how it was made)."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from marble_rl.charts.style import PALETTE
from marble_rl.errors import InputError
from marble_rl.intervals import Difference
from marble_rl.report.charts import Chart, forest
from marble_rl.report.jobs import StoredJob, curves, peak_memory, pictures, read_jobs, shown_methods
from marble_rl.report.lenient import UNREADABLE, number_of, numbers, spanned
from marble_rl.report.page import render
from marble_rl.report.pictures import Gallery, shown_cards
from marble_rl.report.verdicts import Answer, Verdict
from marble_rl.report.wording import count_word, counted, duration, listed, memory, number

FILE = "compare.json"
JOBS = "jobs"
COMPOSITE = "composite"


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    about: str
    seeds: list[int]
    figures: dict[str, Difference]
    """By reward, and the composite: mean and 95 % interval"""
    differences: dict[str, Difference]
    """To the method compared with, paired by seed"""
    shared_seeds: int
    """Seeds that both have; with one the intervals of differences are over its prompts"""
    budget: tuple[float, float]
    """Steps, and images a step"""
    seconds: float
    per_step: float
    training: dict[str, float]


@dataclass(frozen=True)
class StoredComparison:
    rewards: list[str]
    held_out: list[str]
    against: str | None
    methods: list[Method]
    holes: list[str]
    crashed: list[str]
    """Methods without any result"""
    prompts: int
    images_per_prompt: int

    @property
    def columns(self) -> list[str]:
        return [*self.rewards, COMPOSITE]

    @property
    def columns_shown(self) -> list[str]:
        """What decides comes first."""
        return [COMPOSITE, *self.rewards]

    @property
    def same(self) -> list[str]:
        """What all methods have in common; one that was not trained has no budget."""
        budgets = {method.budget for method in self.methods if method.seconds}
        seeds = {tuple(method.seeds) for method in self.methods}
        return [*(["budget"] if len(budgets) == 1 else []), *(["seeds"] if len(seeds) == 1 else [])]


class NothingYet(InputError):
    """A comparison of which no job has ended."""


def is_comparison(folder: Path) -> bool:
    """Also one that has only begun."""
    return (folder / FILE).is_file() or (folder / JOBS).is_dir()


def read_comparison(folder: Path) -> StoredComparison:
    """Raises InputError where it is not what this version writes."""
    if not (folder / FILE).exists():
        if any((folder / JOBS).glob("*.json")):
            raise InputError(f"{folder} has results and no table: make it by marble compare {folder} --table-only")
        raise NothingYet(f"{folder}: no job of this comparison has ended yet; look again later, or give --watch")
    try:
        tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found = StoredComparison(
            [str(name) for name in tree["rewards"]],
            [str(name) for name in tree["held_out"]],
            tree["against"],
            [_method(row) for row in tree["rows"]],
            [
                "{method} seed {seed}: {stage} ended with exit code {exit_code}: {last_line}".format(**h)
                for h in tree["holes"]
            ],
            [name for name in dict.fromkeys(str(h["method"]) for h in tree["holes"]) if name not in _names(tree)],
            int(number_of(tree["prompts"])),
            int(number_of(tree["images_per_prompt"])),
        )
        if not found.methods or any(set(found.columns) - set(method.figures) for method in found.methods):
            raise ValueError("it has no methods, or not a figure of each for every reward")
        return found
    except UNREADABLE as error:
        raise InputError(
            f"{folder / FILE} is not what this version of marble compare writes ({type(error).__name__}: {error}). "
            f"Make it anew: marble compare {folder} --table-only"
        ) from None


def _names(tree: dict[str, Any]) -> list[str]:
    return [str(row["method"]) for row in tree["rows"]]


def _method(row: dict[str, Any]) -> Method:
    return Method(
        str(row["method"]),
        str(row["about"]),
        list(row["seeds"]),
        {name: _interval(found) for name, found in row["figures"].items()},
        {name: _interval(found) for name, found in row["differences"].items()},
        int(number_of(next((d.get("n", len(row["seeds"])) for d in row["differences"].values()), 0))),
        (number_of(row.get("steps", 0)), number_of(row.get("images_per_step", 0))),
        number_of(row["train_seconds"]),
        number_of(row.get("seconds_per_step", 0)),
        numbers(row["training"]),
    )


def _interval(found: dict[str, Any]) -> Difference:
    told = spanned(found)
    if told is None:
        raise ValueError("a mean without both ends of its interval")
    return told


def comparison_page(folder: Path, *, refresh_seconds: int | None = None) -> str:
    found = read_comparison(folder)
    jobs = read_jobs(folder)
    shown = shown_methods([method.name for method in found.methods], found.against)
    seed, prompts = pictures(jobs, shown)
    gallery = Gallery([])
    config = next((job for job in jobs if job.method == "marble"), jobs[0] if jobs else None)
    colour = {method.name: f"r{i % PALETTE}" for i, method in enumerate(found.methods)}
    return render(
        "comparison.html.j2",
        title=folder.resolve().name,
        heading=_heading(found),
        comparison=found,
        best=_best(found),
        verdicts=_verdicts(found),
        colours=colour,
        charts=_charts(found, colour),
        curves=curves(jobs, shown, [n for n in found.rewards if n not in found.held_out], colour),
        shown=shown,
        cards=shown_cards(prompts, gallery),
        seed=seed,
        remarks=[*found.holes, *gallery.remarks],
        harmony=_harmony(found),
        memory={name: memory(peak) for name, peak in peak_memory(jobs).items()},
        prompts=_prompts(config),
        config=config,
        config_text="" if config is None else yaml.safe_dump(config.config, sort_keys=False, allow_unicode=True),
        minutes={method.name: duration(method.seconds) for method in found.methods if method.seconds},
        per_step={method.name: duration(method.per_step) for method in found.methods if method.per_step},
        refresh_seconds=refresh_seconds,
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _heading(found: StoredComparison) -> str:
    methods = counted(len(found.methods) + len(found.crashed), "method").capitalize()
    holes = f" ({count_word(len(found.crashed))} crashed)" if found.crashed else ""
    return f"{methods}{holes}, {counted(len(found.rewards), 'reward')}"


def _prompts(job: StoredJob | None) -> str:
    """Which ones were evaluated: without held-out ones those of the training."""
    chosen = None if job is None else job.config.get("prompts")
    if not isinstance(chosen, dict):
        return "evaluated prompts"
    return "held-out prompts" if chosen.get("heldout") else "training prompts"


def _best(found: StoredComparison) -> dict[str, float]:
    """The highest mean of each column."""
    return {name: max(method.figures[name].mean for method in found.methods) for name in found.columns}


def _verdicts(found: StoredComparison) -> list[Verdict]:
    """Each method against the one compared with. The composite decides; rewards that go another way are named."""
    verdicts = []
    for method in found.methods:
        known = {name: d for name, d in method.differences.items() if name in found.rewards}
        if not known:
            continue
        better = [name for name, d in known.items() if d.low > 0]
        worse = [name for name, d in known.items() if d.high < 0]
        composite = method.differences.get(COMPOSITE)
        answer, text = _by_composite(composite, partly=bool(better))
        if method.shared_seeds == 1:
            answer, text = "unknown", f"{text}, in one training of each: others may differ"
        parts = {"better on": better, "worse on": worse}
        text = "; ".join([text, *(f"{word} {listed(names)}" for word, names in parts.items() if names)]) + "."
        figures = (
            [] if composite is None else [f"composite {number(composite.mean, signed=True)} ({_range(composite)})"]
        )
        only = ": the interval is over its prompts" if method.shared_seeds == 1 else ""
        figures.append(f"{counted(method.shared_seeds, 'seed')}{only}")
        verdicts.append(Verdict(f"Is {method.name} better than {found.against}?", answer, text, figures))
    return verdicts


def _by_composite(found: Difference | None, *, partly: bool) -> tuple[Answer, str]:
    """``partly``: it is better on some reward, which decides nothing against a composite that is open."""
    if found is not None and found.low > 0:
        return "yes", "Better by the composite"
    if found is not None and found.high < 0:
        return "no", "Worse by the composite"
    return "partly" if partly else "unknown", "No difference can be told by the composite"


def _range(found: Difference) -> str:
    return f"{number(found.low, signed=True)} to {number(found.high, signed=True)}"


def _charts(found: StoredComparison, colour: dict[str, str]) -> list[Chart]:
    """One a column, the composite first; methods in the order of the table."""
    charts = []
    for name in [COMPOSITE, *found.rewards]:
        rows = [(method.name, method.figures[name], colour[method.name]) for method in found.methods]
        title = f"{name} (held out)" if name in found.held_out else name
        charts.append(forest(title, rows))
    return charts


def _harmony(found: StoredComparison) -> list[tuple[str, list[str]]]:
    """Means over the refreshes of the methods that have any."""
    keys = ("heldout/min_cos", "ws_heldout/min_cos", "heldout/conflict", "ws_heldout/conflict", "qp/norm")
    rows = [method for method in found.methods if "heldout/min_cos" in method.training]
    return [(m.name, [number(m.training[key]) if key in m.training else "" for key in keys]) for m in rows]
