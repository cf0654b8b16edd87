"""The samples that one optimizer update trains on, and the noise levels of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

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
    update_samples: int
    """Samples of this update on all ranks"""
    sigmas: Tensor
    """[N, M] noise levels, drawn from `Loss.levels` without replacement"""
    experts: Tensor
    """[N, M] the transformer that predicts at each of these levels; 0 where the model has one"""
    regularized: Tensor
    """[N, M] bool: whether KL (in refreshes also base) is computed (`regularize_every`)"""
    seed: int
    step: int
    share_noise: bool = False
    """The samples of a group have the same noise, and the same noise levels (`loss.noise: group`)"""

    def noise(self, rows: Tensor, level: int) -> Tensor:
        """[B, ...] noise of the samples ``rows`` [B] for their noise level ``sigmas[:, level]``.

        Shared noise comes in pairs: at every second level it is that of the level before, with the sign reversed.
        """
        shape, mirrored = tuple(self.x0.shape[1:]), self.share_noise and level % 2 == 1
        named = self.samples[rows] * (not self.share_noise)
        keys = list(zip(self.slots[rows].tolist(), named.tolist(), strict=True))
        drawn = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        sources = (generator(self.seed, "noise", self.step, *key, level - mirrored) for key in drawn)
        noise = normal_rows(sources, shape)[[drawn[key] for key in keys]]
        return -noise if mirrored else noise

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
        return self.update_samples * self.sigmas.shape[1]

    def micro_batches(self, size: int, silent: Tensor | None = None) -> Iterator[tuple[Tensor, int, bool]]:
        """Yield (samples [<= size], index of the noise level, whether they are regularised) of each micro-batch.

        A micro-batch holds samples of one half only, so that a half's gradient needs no extra pass, and of one
        transformer, because fused gradients need all rows in one pass. ``silent`` [N, M]: those to leave out.
        """
        for regularize in (True, False):
            chosen = self.regularized == regularize
            chosen = chosen if silent is None else chosen & ~silent
            for half in (0, 1):
                of_levels = [
                    (chosen[:, level] & (self.halves == half)).nonzero()[:, 0].split(size)
                    for level in range(self.sigmas.shape[1])
                ]
                for pieces in zip_longest(*of_levels, fillvalue=self.slots[:0]):
                    for level, rows in enumerate(pieces):
                        experts = self.experts[rows, level]
                        for expert in experts.unique():
                            yield rows[experts == expert], level, regularize


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
    slots = torch.tensor(rollout.table_rows(update)) // rollout.group_size
    samples = rows % rollout.group_size
    share_noise = loss.settings.noise == "group"
    half_of_slot = torch.tensor([group.half for group in rollout.drawn])
    levels, experts = training_levels(loss, rollout.sigmas, expert_of)
    wanted = loss.settings.timesteps_per_sample or len(levels)
    keys = zip(slots.tolist(), (samples * (not share_noise)).tolist(), strict=True)
    chosen = torch.stack([_drawn(experts, seed, step, slot, sample)[:wanted] for slot, sample in keys])
    every = loss.settings.regularize_every
    # Where a group cannot be divided evenly, each has other positions. Where it can, all groups have the same ones:
    # ranks that share a sharded model must make the same passes.
    places = samples if rollout.group_size % every == 0 else samples + slots
    return TrainingBatch(
        x0=rollout.x0[here[0] : here[-1] + 1],
        conditioning=rollout.conditioning,
        groups=rows // rollout.group_size,
        slots=slots,
        samples=samples,
        halves=half_of_slot[slots],
        update_samples=len(rollout.table_rows(update, all_ranks=True)),
        sigmas=levels[chosen],
        experts=experts[chosen],
        regularized=regularized(places, chosen.shape[1], every, seed, step),
        seed=seed,
        step=step,
        share_noise=share_noise,
    )


def regularized(places: Tensor, levels: int, every: int, seed: int, step: int) -> Tensor:
    """[N, M]: one in ``every`` places [N] at each of its M noise levels, others in each step."""
    first = torch.randint(every, (levels,), generator=generator(seed, "regularize", step))
    return (places[:, None] + first) % every == 0


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
