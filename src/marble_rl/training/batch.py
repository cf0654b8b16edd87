"""The samples that one optimizer update trains on, and the noise levels of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.losses.settings import LossConfig
from marble_rl.seeding import generator, normal_rows
from marble_rl.types import Conditioning, Rollout


@dataclass(frozen=True)
class TrainingBatch:
    """The samples of one optimizer update that this process trains on, and the noise levels of each."""

    x0: Tensor
    """[N, C, H, W]"""
    conditioning: Conditioning
    """Leading dimension: the groups sampled here; row ``groups[i]`` belongs to sample i."""
    groups: Tensor
    """[N] number of the sample's group among those"""
    slots: Tensor
    """[N] slot of the sample's group in the rollout"""
    samples: Tensor
    """[N] position of the sample in its group"""
    halves: Tensor
    """[N] 0 or 1"""
    update_halves: Tensor
    """[all] the same for the samples of all processes"""
    first: int
    """Which of those is our first sample; ours stand together"""
    sigmas: Tensor
    """[N, M]: M of the levels sampled with, in an order of each sample's own"""
    seed: int
    step: int

    def noise(self, rows: Tensor, column: int) -> Tensor:
        """[B, C, H, W] noise of the given samples at their ``column``-th level."""
        keys = zip(self.slots[rows].tolist(), self.samples[rows].tolist(), strict=True)
        sources = (generator(self.seed, "noise", self.step, slot, sample, column) for slot, sample in keys)
        return normal_rows(sources, tuple(self.x0.shape[1:]))

    @property
    def total_rows(self) -> int:
        """(sample, level) pairs of all processes."""
        return len(self.update_halves) * self.sigmas.shape[1]

    def pieces(self, size: int) -> Iterator[tuple[int, Tensor, int]]:
        """The number of a piece, its samples [<= size] and the number of their level: what one forward pass takes.

        Never samples of both halves, so that a half's gradient costs no pass of its own. The samples of all processes
        are cut and numbered, and each keeps what is its own: a piece has one number, whoever computes it.
        """
        number = 0
        for half in (0, 1):
            rows = (self.update_halves == half).nonzero()[:, 0] - self.first
            for part in rows.split(size) if len(rows) else ():
                own = part[(part >= 0) & (part < len(self.halves))]
                for level in range(self.sigmas.shape[1]):
                    if len(own):
                        yield number, own, level
                    number += 1


def training_batch(rollout: Rollout, update: int, config: LossConfig, *, seed: int, step: int) -> TrainingBatch:
    """The rollout's samples for its ``update``-th optimizer update."""
    here = rollout.update_rows(update)
    rows = torch.tensor(here)
    table_rows, everyones = rollout.table_rows(update), rollout.table_rows(update, everyone=True)
    slots = torch.tensor(table_rows) // rollout.group_size
    samples = rows % rollout.group_size
    half_of_slot = torch.tensor([group.half for group in rollout.drawn])
    levels = rollout.sigmas[:-1]
    levels = levels[: max(1, int(config.timestep_fraction * len(levels)))]
    wanted = min(config.timesteps_per_sample or len(levels), len(levels))
    orders = [
        torch.randperm(len(levels), generator=generator(seed, "timesteps", step, slot, sample))[:wanted]
        for slot, sample in zip(slots.tolist(), samples.tolist(), strict=True)
    ]
    return TrainingBatch(
        x0=rollout.x0[here.start : here.stop],
        conditioning=rollout.conditioning,
        groups=rows // rollout.group_size,
        slots=slots,
        samples=samples,
        halves=half_of_slot[slots],
        update_halves=half_of_slot[torch.tensor(everyones) // rollout.group_size],
        first=table_rows.start - everyones.start,
        sigmas=levels[torch.stack(orders)],
        seed=seed,
        step=step,
    )
