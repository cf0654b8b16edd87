"""`marble diagnose`: measure, analyse, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from marble_rl.diagnose.analysis import (
    advantage_facts,
    direction_figures,
    independent_figures,
    merged,
    qp_facts,
    signal,
    signal_intervals,
    true_cosines,
)
from marble_rl.diagnose.answers import answers
from marble_rl.diagnose.directions import MEANINGS, directions
from marble_rl.diagnose.intervals import FEWEST
from marble_rl.diagnose.levels import LEVELS, LevelDiagnosis, measure_levels
from marble_rl.diagnose.measure import Measured, measure
from marble_rl.diagnose.record import DIAGNOSIS, AppliedFigures, Diagnosis, DirectionFigures
from marble_rl.errors import InputError
from marble_rl.inference.opening import Opened, open_target
from marble_rl.runs.folder import RunFolder
from marble_rl.storage import storage_errors

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Batch sizes beside the one measured."""
PRINTED_EVERY = 10
"""Mini-batches between two lines where the output is not a terminal."""
LARGER = (2, 4, 8, 16)
"""Batch sizes beside the one measured at which directions are compared too, by merging mini-batches."""


def diagnose(run: Path, *, batches: int, step: int | None, device: str, out: Path, console: Console) -> Diagnosis:
    """Measure ``batches`` fresh mini-batches with a run's checkpoint; write diagnosis.json and products.npy."""

    def on_products(products: Tensor) -> None:
        with storage_errors(str(out), "diagnose again"):
            np.save(out / "products.npy", products.numpy())

    with _measuring(run, batches, step, device, out, console) as (opened, scratch, on_batch):
        measured = measure(run, opened, batches, scratch, console, on_batch, on_products)
    diagnosis = analyse(measured, opened.step)
    with storage_errors(str(out), "diagnose again"):
        diagnosis.write(out / DIAGNOSIS)
    return diagnosis


def diagnose_levels(
    run: Path, *, batches: int, step: int | None, device: str, out: Path, console: Console
) -> LevelDiagnosis:
    """Measure each noise level alone; write levels.json."""
    with _measuring(run, batches, step, device, out, console) as (opened, scratch, on_batch):
        found = measure_levels(run, opened, batches, scratch, console, on_batch)
    with storage_errors(str(out), "diagnose again"):
        found.write(out / LEVELS)
    return found


@contextmanager
def _measuring(
    run: Path, batches: int, step: int | None, device: str, out: Path, console: Console
) -> Iterator[tuple[Opened, Path, Callable[[int], None]]]:
    """The opened run, a folder for gradients, and what shows that so many batches are done."""
    RunFolder(run).load_config()
    columns = (TextColumn("mini-batches"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    task = progress.add_task("", total=batches)

    def on_batch(done: int) -> None:
        progress.update(task, completed=done)
        if not console.is_terminal and (done % PRINTED_EVERY == 0 or done == batches):
            console.print(f"{done}/{batches} mini-batches", highlight=False)

    with _scratch(out) as scratch:
        opened = open_target(str(run), step=step, device=device)
        opened.model.check_trainable()
        with progress:
            yield opened, scratch, on_batch


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder inside ``out``: on the disk that has room for results. A system's /tmp may be in memory."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A network drive may keep a file that is in use until the process ends: no reason to lose the results.
        folder = TemporaryDirectory(prefix=".gradients-", dir=out, ignore_cleanup_errors=True)
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror}; give another folder") from error
    with folder as path:
        yield Path(path)


def analyse(measured: Measured, step: int | None) -> Diagnosis:
    k, products = len(measured.names), measured.products
    sizes = [size for size in LARGER if len(products) // size >= FEWEST]
    signals = signal_intervals(products, k)
    return Diagnosis(
        names=measured.names,
        step=step,
        batches=len(products),
        images=measured.images,
        answers=answers(measured.names, products, measured.directions, signals),
        directions=_figures(products, measured.directions, k),
        larger={size: _larger(measured, size) for size in sizes},
        applied={name: _applied(cosines) for name, cosines in measured.applied.items()},
        signal={size: signal(products, k, size).tolist() for size in SIZES},
        signal_intervals=signals,
        cosines=true_cosines(products, signals).tolist(),
        advantages=advantage_facts(products, measured.advantages, k),
        qp=qp_facts(products, k),
        samples=measured.samples,
        meanings=MEANINGS,
    )


def _larger(measured: Measured, size: int) -> dict[str, DirectionFigures]:
    k, products = len(measured.names), merged(measured.products, size)
    advantages = measured.advantages[: len(products) * size].unflatten(0, (-1, size)).mean(1)
    return _figures(products, directions(products, advantages, k, measured.alpha_bar), k)


def _figures(products: Tensor, weights: dict[str, Tensor], rewards: int) -> dict[str, DirectionFigures]:
    return {name: direction_figures(products, of, rewards) for name, of in weights.items()}


def _applied(cosines: Tensor) -> AppliedFigures:
    """From [M, M, K]: of the step made from batch m with the gradients of batch n."""
    figures = independent_figures(cosines)
    return AppliedFigures(figures.get("min_cos"), figures.get("conflict"))
