"""Which noise levels carry the signal: one gradient per reward and noise level, on fresh mini-batches.

    signal_kl = |mu_kl|^2 / E|g_kl|^2        mu_kl = E g_kl: the true gradient of reward k at level l
    length_l  = mean over rewards of sqrt(E|g_kl|^2), relative to the longest

A step adds up the gradients of its levels. Where some are much longer than others, their noise drowns the signal of the
rest. `loss.timestep_power: p` multiplies the loss at level t by t^p; the power that evens the lengths out is minus the
slope of log length over log level.
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
from marble_rl.diagnose.measure import FIRST_ROLLOUT, check_space, experience_source, measuring, stored
from marble_rl.gradients.products import gram
from marble_rl.inference.opening import Opened
from marble_rl.intervals import Interval
from marble_rl.losses.base import LEAST_LEVEL, Loss
from marble_rl.losses.registry import LOSSES
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.runs.inputs import check_inputs
from marble_rl.runs.log import Display
from marble_rl.storage import Record
from marble_rl.training.batch import TrainingBatch, training_batch
from marble_rl.training.policy_gradients import GradientStage

LEVELS = "levels.json"
EVEN = 2.0
"""Lengths that differ by less are left alone."""


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
    power: float | None
    """Of the level, that the lengths fall with; None for a single level"""


def measure_levels(
    opened: Opened, batches: int, scratch: Path, console: Console, on_batch: Callable[[int], None]
) -> LevelDiagnosis:
    """Every batch is one rollout, of which all samples are trained at every level. ``scratch``: an empty folder, where
    the gradients are kept while this lasts."""
    assert opened.policy is not None
    assert opened.config is not None
    config = measuring(opened.config)
    names, size = config.trained_rewards, opened.policy.flat.numel()
    inputs = check_inputs(config)
    _load_rewards(inputs.scorer, opened, console)
    source = experience_source(config, inputs, opened)
    display = Display(Console(quiet=True), batches, 0, names, 1)
    alone = {"timesteps_per_sample": None, "timestep_power": 0.0, "kl_weight": 0.0}
    loss = LOSSES.part_of(config.loss)(config.loss.model_copy(update=alone))
    images = config.rollout.groups * config.rollout.group_size
    stage = GradientStage(
        opened.model, opened.policy, loss, MicroBatch(config.trainer.micro_batch, images, console.print)
    )
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
            g[i, m] = stage.per_reward(at_level(batch, level), columns, keep_halves=False).gradients.g.cpu()
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
        weights=torch.ones(column.shape),
        regularized=torch.zeros(column.shape, dtype=torch.bool),
    )


def _load_rewards(scorer: Scorer, opened: Opened, console: Console) -> None:
    for remark in scorer.load(opened.model.device):
        console.print(remark, markup=False, soft_wrap=True)


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
        power=fitted_power(levels, lengths),
    )


def fitted_power(levels: Tensor, lengths: Tensor) -> float | None:
    """Least squares on logarithms, over the levels that `timestep_power` tells apart."""
    known = (levels >= LEAST_LEVEL) & (lengths > 0)
    if known.sum() < 2:
        return None
    x, y = levels[known].double().log(), lengths[known].double().log()
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


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
    console.print(advice(found), markup=False, highlight=False)


def advice(found: LevelDiagnosis) -> str:
    shortest, longest = min(found.lengths), max(found.lengths)
    if found.power is None or longest < EVEN * shortest:
        return "The gradients of all levels are about as long: loss.timestep_power: 0 suits them."
    return (
        f"The lengths grow like level^{found.power:.1f}, so the noise of the longest drowns the signal of the others. "
        f"loss.timestep_power: {-round(2 * found.power) / 2:g} evens them out."
    )
