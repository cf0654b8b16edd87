"""`marble diagnose`: measure, tell, draw."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from marble_rl.diagnose.analysis import (
    AdvantageFacts,
    Conflict,
    DirectionFigures,
    Estimate,
    QpFacts,
    advantage_facts,
    constructed_conflict,
    direction_figures,
    merged,
    qp_facts,
    signal,
    true_cosines,
)
from marble_rl.diagnose.directions import MEANINGS, directions
from marble_rl.diagnose.measure import Measured, Sample, measure
from marble_rl.inference import open_target
from marble_rl.runfolder import RunFolder
from marble_rl.storage import storage_errors, write_json

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Batch sizes beside the one measured."""
TOLD_EVERY = 10
"""Mini-batches between two lines where the output is not a terminal."""
LARGER = (2, 4, 8, 16)
"""Batch sizes beside the one measured at which directions are compared too, by merging mini-batches."""
FEWEST = 3
"""Batches that must be left after merging."""
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class AppliedFigures:
    """Of the step that AdamW takes, on independent batches."""

    min_cos: Estimate
    conflict: Estimate


@dataclass(frozen=True)
class Diagnosis:
    """What the gradients of a run say."""

    names: tuple[str, ...]
    step: int | None
    batches: int
    images: int
    directions: dict[str, DirectionFigures]
    larger: dict[int, dict[str, DirectionFigures]]
    """The same for batches so many times as large, as far as there are enough"""
    applied: dict[str, AppliedFigures]
    signal: dict[float, list[float]]
    """By batch size relative to the run's: [K]"""
    cosines: list[list[float]]
    """[K, K] between the rewards' true gradients; NaN where one cannot be told from noise"""
    advantages: AdvantageFacts
    qp: QpFacts
    conflict: list[Conflict]
    samples: list[Sample]

    def to_json(self) -> dict[str, Any]:
        return {**_plain(asdict(self)), "meanings": MEANINGS}


def _plain(value: Any) -> Any:
    """JSON has no NaN: what cannot be told is null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def diagnose(run: Path, *, batches: int, step: int | None, device: str, out: Path, console: Console) -> Diagnosis:
    """Measure ``batches`` fresh mini-batches with a run's checkpoint; write diagnosis.json, diagnosis.png and
    products.npy."""
    RunFolder(run).load_config()
    opened = open_target(str(run), step=step, device=device)
    columns = (TextColumn("mini-batches"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=batches)

        def on_batch(done: int) -> None:
            progress.update(task, completed=done)
            if not console.is_terminal and (done % TOLD_EVERY == 0 or done == batches):
                console.print(f"{done}/{batches} mini-batches", highlight=False)

        measured = measure(run, opened, batches, console, on_batch)
    found = _told(measured, opened.step)
    with storage_errors(str(out)):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "diagnosis.json", found.to_json())
        np.save(out / "products.npy", measured.products.numpy())
    from marble_rl.diagnose.figure import draw_diagnosis

    draw_diagnosis(found, out / "diagnosis.png")
    return found


def _told(measured: Measured, step: int | None) -> Diagnosis:
    k, products = len(measured.names), measured.products
    sizes = [size for size in LARGER if len(products) // size >= FEWEST]
    return Diagnosis(
        measured.names,
        step,
        len(products),
        measured.images,
        _figures(products, measured.directions, k),
        {size: _larger(measured, size) for size in sizes},
        {name: _applied(cosines) for name, cosines in measured.applied.items()},
        {size: signal(products, k, size).tolist() for size in SIZES},
        true_cosines(products, k).tolist(),
        advantage_facts(products, measured.advantages, k),
        qp_facts(products, measured.directions["marble"], k),
        constructed_conflict(products, k, STRENGTHS) if k > 1 else [],
        measured.samples,
    )


def _larger(measured: Measured, size: int) -> dict[str, DirectionFigures]:
    k, products = len(measured.names), merged(measured.products, size)
    advantages = measured.advantages[: len(products) * size].unflatten(0, (-1, size)).mean(1)
    return _figures(products, directions(products, advantages, k, measured.alpha_bar), k)


def _figures(products: Tensor, weights: dict[str, Tensor], rewards: int) -> dict[str, DirectionFigures]:
    return {name: direction_figures(products, of, rewards) for name, of in weights.items()}


def _applied(cosines: Tensor) -> AppliedFigures:
    """From [M, M, K]: for each batch, the mean over the others of the smallest cosine, and how often it is negative."""
    count = len(cosines)
    smallest = cosines.nan_to_num(torch.inf).min(2).values
    others = [[float(smallest[m, n]) for n in range(count) if n != m] for m in range(count)]
    return AppliedFigures(
        Estimate.of([fmean(row) for row in others]),
        Estimate.of([fmean(float(x < 0) for x in row) for row in others]),
    )
