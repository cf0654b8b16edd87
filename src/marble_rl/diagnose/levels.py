"""Which noise levels carry the signal: one gradient per reward and noise level, on fresh mini-batches.

    signal_kl = |mu_kl|^2 / E|g_kl|^2        mu_kl = E g_kl: the true gradient of reward k at level l
    length_l  = mean over rewards of sqrt(E|g_kl|^2), relative to the longest

A step adds up the gradients of its levels: the longest decide most of it, in signal and in noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from marble_rl.diagnose.analysis import signal_intervals
from marble_rl.diagnose.measure import (
    FIRST_ROLLOUT,
    check_space,
    experience_source,
    gradient_stage,
    measuring,
    restore_stage,
    stored,
)
from marble_rl.gradients.products import gram
from marble_rl.inference.opening import Opened
from marble_rl.intervals import Interval
from marble_rl.losses.base import Loss
from marble_rl.losses.registry import LOSSES
from marble_rl.runs.checkpoint import restoring
from marble_rl.runs.log import Display
from marble_rl.storage import Record
from marble_rl.training.batch import TrainingBatch, training_batch

LEVELS = "levels.json"


class LevelDiagnosis(Record):
    """Signal and length of the gradients at each noise level."""

    kind: ClassVar[str] = "a diagnosis of noise levels"
    fix: ClassVar[str] = "Run marble diagnose --levels again, or delete the file"

    names: tuple[str, ...]
    """[K] rewards"""
    step: int | None
    batches: int
    images: int
    """In each batch"""
    noise: str
    """`loss.noise`"""
    levels: list[float]
    """[L] noise levels that are trained on, descending"""
    lengths: list[float]
    """[L] relative to the longest"""
    signals: list[list[Interval | None]]
    """[L, K]; None for a reward without a gradient"""


def measure_levels(
    run: Path, opened: Opened, batches: int, scratch: Path, console: Console, on_batch: Callable[[int], None]
) -> LevelDiagnosis:
    """Every batch is one rollout, of which all samples are trained at every level. ``scratch``: an empty folder, where
    the gradients are kept while this lasts."""
    assert opened.policy is not None
    assert opened.config is not None
    assert opened.checkpoint is not None
    config = measuring(opened.config)
    names, size = config.trained_rewards, opened.policy.flat.numel()
    source = experience_source(config, opened, console)
    display = Display(Console(quiet=True), batches, 0, names, 1)
    alone = {"timesteps_per_sample": None, "kl_weight": 0.0}
    loss = LOSSES.part_of(config.loss)(config.loss.model_copy(update=alone))
    images = config.rollout.groups * config.rollout.group_size
    stage = gradient_stage(opened, config, loss, console)
    with restoring(opened.checkpoint, run):
        restore_stage(stage, opened.checkpoint)
    g, levels = torch.empty(0), torch.empty(0)
    for m in range(batches):
        experience = source.gather(FIRST_ROLLOUT + m, 0, display)
        drawn = {"seed": config.trainer.seed, "step": FIRST_ROLLOUT + m}
        batch = training_batch(experience.rollout, 0, loss, **drawn, expert_of=opened.model.experts)
        if m == 0:
            levels = batch.sigmas.unique().flip(0)
            check_space(scratch, batches, gradients=len(levels) * len(names), parameters=size)
            g = stored(scratch / "levels", (len(levels), batches, len(names), size))
        for i, level in enumerate(levels):
            columns = experience.scored.advantages
            g[i, m] = stage.per_reward(at_level(batch, level), columns, halves_on=0).gradients.g.cpu()
        on_batch(m + 1)
    products = [gram(of.flatten(0, 1)).view(batches, len(names), batches, len(names)) for of in g]
    return _judged(names, products, levels, opened.step, images, loss)


def at_level(batch: TrainingBatch, level: Tensor) -> TrainingBatch:
    """All samples at this noise level alone, without the shared part."""
    column = (batch.sigmas == level).float().argmax(dim=1, keepdim=True)
    return replace(
        batch,
        sigmas=batch.sigmas.gather(1, column),
        experts=batch.experts.gather(1, column),
        regularized=torch.zeros(column.shape, dtype=torch.bool),
    )


def _judged(
    names: tuple[str, ...], products: list[Tensor], levels: Tensor, step: int | None, images: int, loss: Loss
) -> LevelDiagnosis:
    squared = torch.stack([torch.einsum("mkmk->k", of) / len(of) for of in products])
    lengths = squared.sqrt().mean(dim=1)
    lengths = lengths / lengths.max().clamp_min(1e-30)
    return LevelDiagnosis(
        names=names,
        step=step,
        batches=len(products[0]),
        images=images,
        noise=loss.settings.noise,
        levels=levels.tolist(),
        lengths=lengths.tolist(),
        signals=[signal_intervals(of, len(names)) for of in products],
    )


def print_levels(found: LevelDiagnosis, console: Console) -> None:
    console.print(
        f"{found.batches} fresh mini-batches of {found.images} images, policy after step {found.step}, "
        f"loss.noise: {found.noise}",
        markup=False,
    )
    table = Table(title="Gradients by noise level", box=SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(("noise level", "length", *(f"signal {name}" for name in found.names))):
        table.add_column(column, justify="right" if i else "left")
    for level, length, signals in zip(found.levels, found.lengths, found.signals, strict=True):
        shown = ["" if s is None else f"{s.mean:.2f} ({s.low:.2f} to {s.high:.2f})" for s in signals]
        table.add_row(f"{level:.2f}", f"{length:.3f}", *shown)
    console.print(table)
    console.print(
        "length: of a reward's gradient, mean over the rewards, relative to the longest. signal: share of its square "
        "that is not noise, with 95 % intervals",
        style="dim",
    )
