"""What `marble train` prints around the training: before the first step what it will do, and at its end two tables,
the harmony of the updates and the signal of each reward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marble_rl.config import RunConfig
from marble_rl.errors import count_of
from marble_rl.runs.metrics_lines import read_lines
from marble_rl.types import Metrics

LEAST_REFRESHES = 5
"""Below this nothing is said about a mean over refreshes."""
ROWS = 5
"""Most rows of a table: the refreshes of a run are divided into this many parts."""


def introduction(config: RunConfig, out: Path, device: object, trained: int, frozen: int) -> list[str]:
    """``trained`` and ``frozen``: numbers of parameters of the adapter, and of the model that it is on."""
    c = config
    held_out = [reward.name for reward in c.rewards if reward.held_out]
    named = {"objectives": c.objectives, "guards": tuple(c.guards), "evaluation only": held_out}
    rewards = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in named.items() if names)
    images = c.rollout.groups * c.rollout.group_size
    updates = "" if c.rollout.steps_each == 1 else f" for {c.rollout.steps_each} steps"
    return [
        f"model {c.model.path} on {device}: trains {trained:,} LoRA parameters, {frozen:,} are frozen",
        f"{rewards}; rule: {c.balance.type}",
        f"{count_of(c.trainer.steps, 'step')}, {count_of(images, 'image')} a rollout{updates}, seed {c.trainer.seed}; "
        f"folder {out}",
    ]


def print_summary(console: Console, metrics_file: Path, rewards: Sequence[str]) -> None:
    """Print what the refreshes of a run measured. Nothing is printed for a run without refreshes."""
    refreshes = [line for line in read_lines(metrics_file) if "heldout/min_cos" in line]
    if not refreshes:
        return
    if len(refreshes) < LEAST_REFRESHES:
        console.print(
            f"\nHarmony and signal: too few refreshes to say ({len(refreshes)}, where {LEAST_REFRESHES} are needed). "
            "Their figures are in metrics.jsonl.",
            soft_wrap=True,
            highlight=False,
        )
        return
    parts = _parts(refreshes)
    console.print("\n[bold]Harmony on unseen samples[/bold]: cosines of a direction with each reward's gradient on")
    console.print("samples that it was not made from. Conflict: how often one of them is negative.")
    console.print(_harmony(parts))
    if any(f"signal/{name}" in line for line in refreshes for name in rewards):
        console.print("[bold]Signal[/bold]: the share of a reward's squared gradient that is not noise.")
        console.print("Around 0 the gradient is all noise at this batch size; 1 means no noise.")
        console.print(_signal(parts, rewards))


def _parts(refreshes: list[Metrics]) -> list[list[Metrics]]:
    """The refreshes in order, in at most `ROWS` parts of nearly equal size."""
    count = min(ROWS, len(refreshes))
    edges = [round(i * len(refreshes) / count) for i in range(count + 1)]
    return [refreshes[low:high] for low, high in itertools.pairwise(edges)]


def _harmony(parts: list[list[Metrics]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("steps")
    kinds = {"min_cos": "worst cosine", "mean_cos": "mean cosine", "conflict": "conflict"}
    for kind in kinds.values():
        table.add_column(f"{kind}\nthis run", justify="right")
        table.add_column("weighted\nsum", justify="right", style="dim")
    everything = [line for part in parts for line in part]
    for label, lines in [*((_steps(part), part) for part in parts), ("all", everything)]:
        table.add_row(label, *(_mean(lines, f"{who}heldout/{kind}") for kind in kinds for who in ("", "ws_")))
    return table


def _signal(parts: list[list[Metrics]], rewards: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("steps")
    for name in rewards:
        table.add_column(name, justify="right")
    for part in parts:
        table.add_row(_steps(part), *(_mean(part, f"signal/{name}") for name in rewards))
    return table


def _steps(part: list[Metrics]) -> str:
    first, last = int(part[0]["step"]) + 1, int(part[-1]["step"]) + 1  # metrics.jsonl counts from 0
    return str(first) if first == last else f"{first}-{last}"


def _mean(part: list[Metrics], key: str) -> str:
    values = [line[key] for line in part if key in line]
    return f"{sum(values) / len(values):.2f}" if values else ""
