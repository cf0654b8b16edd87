"""The samples that one optimizer update trains on, and the noise levels of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.losses.base import Loss, Noised
from marble_rl.seeding import generator, normal_rows
from marble_rl.types import Conditioning, Rollout

ExpertOf = Callable[[Tensor], Tensor]
"""Noise levels [L] -> the transformer of each; -1 if that one is not adapted"""


def one_expert(sigmas: Tensor) -> Tensor:
    return torch.zeros(len(sigmas), dtype=torch.long)


@dataclass(frozen=True)
class TrainingBatch:
    """The samples of one optimizer update that this rank trains on, and the noise levels of each.

    N counts the samples of this rank. M is the number of noise levels that each sample is trained at.
    """

    x0: Tensor
    """[N, ...]"""
    conditioning: Conditioning
    """One row per group sampled on this rank; row ``groups[i]`` belongs to sample i."""
    groups: Tensor
    """[N] row of the sample's group in ``conditioning``"""
    slots: Tensor
    """[N] slot of the sample's group in the rollout"""
    samples: Tensor
    """[N] position of the sample in its group"""
    halves: Tensor
    """[N] 0 or 1: the half that the sample's group belongs to"""
    update_halves: Tensor
    """``halves`` of this update's samples on all ranks"""
    places: Tensor
    """[N] index of the sample in ``update_halves``, ascending"""
    sigmas: Tensor
    """[N, M] noise levels, drawn for each sample from `Loss.levels` without replacement"""
    experts: Tensor
    """[N, M] the transformer that predicts at each of these levels; 0 where the model has one"""
    seed: int
    step: int

    def noise(self, rows: Tensor, level: int) -> Tensor:
        """[B, ...] noise of the samples ``rows`` [B] for their noise level ``sigmas[:, level]``."""
        keys = zip(self.slots[rows].tolist(), self.samples[rows].tolist(), strict=True)
        sources = (generator(self.seed, "noise", self.step, slot, sample, level) for slot, sample in keys)
        return normal_rows(sources, tuple(self.x0.shape[1:]))

    def noised(self, rows: Tensor, level: int) -> tuple[Noised, Conditioning]:
        """The samples ``rows`` [B] at their noise level ``sigmas[:, level]``, and the conditioning of each."""
        device = self.x0.device
        x0, sigma = self.x0[rows.to(device)], self.sigmas[rows, level].to(device)
        noise = self.noise(rows, level).to(device)
        weight = sigma.reshape(-1, *[1] * (x0.ndim - 1))
        sample = Noised(x0, noise, x_t=(1 - weight) * x0 + weight * noise, t=sigma)
        return sample, self.conditioning.rows(self.groups[rows].to(device))

    @property
    def total_rows(self) -> int:
        """Number of (sample, noise level) pairs on all ranks."""
        return len(self.update_halves) * self.sigmas.shape[1]

    def micro_batches(self, size: int, every: int = 1, offset: int = 0) -> Iterator[tuple[Tensor, int, bool]]:
        """Yield (samples [<= size], index of the noise level, whether to regularise) of each micro-batch.

        A micro-batch holds samples of one half only, so that a half's gradient needs no extra pass. One in ``every`` is
        regularised (`regularize_every`). Which samples are must not depend on how they are divided over ranks: every
        rank numbers the pieces of ``size`` samples of all ranks. It has only some samples of each piece, and joins
        those that are treated alike into full micro-batches.

        One whose samples go to different transformers is then divided: fused gradients need all rows in one pass.
        """
        for rows, level, regularize in self._joined(size, every, offset):
            experts = self.experts[rows, level]
            for expert in experts.unique():
                yield rows[experts == expert], level, regularize

    def _joined(self, size: int, every: int, offset: int) -> Iterator[tuple[Tensor, int, bool]]:
        own = torch.full((len(self.update_halves),), -1)
        own[self.places] = torch.arange(len(self.places))
        number = 0
        for half in (0, 1):
            rows = own[self.update_halves == half]
            waiting: dict[tuple[int, bool], Tensor] = {}
            for piece in rows.split(size) if len(rows) else ():
                for level in range(self.sigmas.shape[1]):
                    alike = (level, number % every == offset)
                    joined = torch.cat([waiting.pop(alike, piece[:0]), piece[piece >= 0]])
                    if len(joined) >= size:
                        yield joined[:size], *alike
                        joined = joined[size:]
                    if len(joined):
                        waiting[alike] = joined
                    number += 1
            for alike, joined in waiting.items():
                yield joined, *alike


def training_levels(loss: Loss, sigmas: Tensor, expert_of: ExpertOf) -> tuple[Tensor, Tensor]:
    """The noise levels to train on, of a rollout's ``sigmas``, and the transformer of each; refused if one that is
    adapted has none."""
    levels = loss.levels(sigmas)
    experts = expert_of(levels)
    adapted = expert_of(torch.tensor([1.0, 0.0])).tolist()
    for expert, name in enumerate(("high", "low")):
        if expert in adapted and not (experts == expert).any():
            raise InputError(
                f"lora.experts: the transformer for {name} noise is adapted, but none of the {len(levels)} noise "
                "levels that are trained on is its own; use more rollout.steps or a larger loss.timestep_fraction, or "
                "adapt the other one only"
            )
    return levels[experts >= 0], experts[experts >= 0]


def training_batch(
    rollout: Rollout, update: int, loss: Loss, *, seed: int, step: int, expert_of: ExpertOf = one_expert
) -> TrainingBatch:
    """The rollout's samples for its ``update``-th optimizer update. ``expert_of``: `DiffusionModel.experts`."""
    here = rollout.update_rows(update)
    rows = torch.tensor(here)
    table_rows, all_rows = rollout.table_rows(update), rollout.table_rows(update, all_ranks=True)
    slots = torch.tensor(table_rows) // rollout.group_size
    samples = rows % rollout.group_size
    half_of_slot = torch.tensor([group.half for group in rollout.drawn])
    levels, experts = training_levels(loss, rollout.sigmas, expert_of)
    wanted = loss.settings.timesteps_per_sample or len(levels)
    keys = zip(slots.tolist(), samples.tolist(), strict=True)
    chosen = torch.stack([_drawn(experts, seed, step, slot, sample)[:wanted] for slot, sample in keys])
    return TrainingBatch(
        x0=rollout.x0[here[0] : here[-1] + 1],
        conditioning=rollout.conditioning,
        groups=rows // rollout.group_size,
        slots=slots,
        samples=samples,
        halves=half_of_slot[slots],
        update_halves=half_of_slot[torch.tensor(all_rows) // rollout.group_size],
        places=torch.tensor(table_rows) - all_rows[0],
        sigmas=levels[chosen],
        experts=experts[chosen],
        seed=seed,
        step=step,
    )


def _drawn(experts: Tensor, seed: int, step: int, slot: int, sample: int) -> Tensor:
    """The noise levels of a sample, indices [L] in random order.

    In every group the samples at one position get levels of the same transformers, in the same order. So ranks that
    share a sharded model make the same passes. For a single sample the order is as random as without this.
    """
    own = torch.randperm(len(experts), generator=generator(seed, "timesteps", step, slot, sample))
    common = torch.randperm(len(experts), generator=generator(seed, "experts", step, sample))
    drawn = torch.empty_like(own)
    for expert in experts.unique():
        drawn[experts[common] == expert] = own[experts[own] == expert]
    return drawn
