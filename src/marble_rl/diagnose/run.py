"""`marble diagnose`: measure, tell, draw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from marble_rl.diagnose.analysis import (
    AdvantageFacts,
    Conflict,
    DirectionFigures,
    QpFacts,
    advantage_facts,
    constructed_conflict,
    direction_figures,
    independent_figures,
    merged,
    qp_facts,
    signal,
    true_cosines,
)
from marble_rl.diagnose.directions import MEANINGS, directions
from marble_rl.diagnose.intervals import FEWEST, UNKNOWN, Estimate
from marble_rl.diagnose.measure import Measured, Sample, measure
from marble_rl.errors import InputError
from marble_rl.inference.opening import open_target
from marble_rl.runs.folder import RunFolder
from marble_rl.storage import storage_errors, write_json

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Batch sizes beside the one measured."""
TOLD_EVERY = 10
"""Mini-batches between two lines where the output is not a terminal."""
LARGER = (2, 4, 8, 16)
"""Batch sizes beside the one measured at which directions are compared too, by merging mini-batches."""
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
    """JSON has neither NaN nor infinity: what cannot be told is null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def diagnose(run: Path, *, batches: int, step: int | None, device: str, out: Path, console: Console) -> Diagnosis:
    """Measure ``batches`` fresh mini-batches with a run's checkpoint; write diagnosis.json, diagnosis.png and
    products.npy."""
    RunFolder(run).load_config()
    columns = (TextColumn("mini-batches"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    task = progress.add_task("", total=batches)

    def on_batch(done: int) -> None:
        progress.update(task, completed=done)
        if not console.is_terminal and (done % TOLD_EVERY == 0 or done == batches):
            console.print(f"{done}/{batches} mini-batches", highlight=False)

    def on_products(products: Tensor) -> None:
        with storage_errors(str(out), "diagnose again"):
            np.save(out / "products.npy", products.numpy())

    with _scratch(out) as scratch:
        opened = open_target(str(run), step=step, device=device)
        opened.model.check_trainable()
        with progress:
            measured = measure(run, opened, batches, scratch, console, on_batch, on_products)
    found = tell(measured, opened.step)
    with storage_errors(str(out), "diagnose again"):
        write_json(out / "diagnosis.json", found.to_json())
    from marble_rl.diagnose.figure import draw_diagnosis

    draw_diagnosis(found, out / "diagnosis.png")
    return found


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder inside ``out``: where there is room for results, and not in memory, as a system's own may be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        # What a network drive keeps of a file in use goes when the process ends; it must not cost the results.
        folder = TemporaryDirectory(prefix=".gradients-", dir=out, ignore_cleanup_errors=True)
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror}; give another folder") from error
    with folder as path:
        yield Path(path)


def tell(measured: Measured, step: int | None) -> Diagnosis:
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
    """From [M, M, K]: of the step made from batch m with the gradients of batch n."""
    found = independent_figures(cosines)
    return AppliedFigures(found.get("min_cos", UNKNOWN), found.get("conflict", UNKNOWN))
