"""Stages 5 and 6 for one optimizer update: predictions, losses and gradients, micro-batch by micro-batch.

A row is one (sample, timestep). Its noise is drawn by name, so the sum over rows is the same however they are cut into
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.config.schema import LossConfig
from marble_rl.gradients.accumulate import GradientAccumulator, RewardGradients
from marble_rl.losses.nft import nft_loss, reference_divergence
from marble_rl.models.base import DiffusionModel
from marble_rl.models.lora import OLD, LoraPolicy
from marble_rl.seeding import generator, normal_rows
from marble_rl.types import Conditioning, Rollout


@dataclass(frozen=True)
class TrainingBatch:
    """The samples of one optimizer update, and the noise levels each is trained on."""

    x0: Tensor
    """[N, C, H, W]"""
    conditioning: Conditioning
    """Leading dimension: all groups of the rollout; row ``slots[i]`` belongs to sample i."""
    slots: Tensor
    """[N] slot of the sample's group in the rollout"""
    samples: Tensor
    """[N] position of the sample in its group"""
    halves: Tensor
    """[N] 0 or 1"""
    sigmas: Tensor
    """[N, M]: M of the levels sampled with, in an order of each sample's own"""
    seed: int
    step: int

    def noise(self, rows: Tensor, column: int) -> Tensor:
        """[B, C, H, W] noise of the given samples at their ``column``-th level."""
        keys = zip(self.slots[rows].tolist(), self.samples[rows].tolist(), strict=True)
        sources = (generator(self.seed, "noise", self.step, slot, sample, column) for slot, sample in keys)
        return normal_rows(sources, tuple(self.x0.shape[1:]))

    def micro_batches(self, size: int) -> Iterator[Tensor]:
        """Row indices [<= size], never from both halves, so that a half's gradient costs no pass of its own."""
        for half in (0, 1):
            rows = (self.halves == half).nonzero()[:, 0]
            yield from rows.split(size) if len(rows) else ()


def training_batch(rollout: Rollout, update: int, config: LossConfig, *, seed: int, step: int) -> TrainingBatch:
    """The rollout's samples for its ``update``-th optimizer update."""
    rows = torch.tensor(rollout.update_rows(update))
    slots = rows // rollout.group_size
    samples = rows % rollout.group_size
    half_of_slot = torch.tensor([group.half for group in rollout.groups])
    levels = rollout.sigmas[:-1]
    levels = levels[: max(1, int(config.timestep_fraction * len(levels)))]
    wanted = min(config.timesteps_per_sample or len(levels), len(levels))
    orders = [
        torch.randperm(len(levels), generator=generator(seed, "timesteps", step, slot, sample))[:wanted]
        for slot, sample in zip(slots.tolist(), samples.tolist(), strict=True)
    ]
    return TrainingBatch(
        x0=rollout.x0[rows.to(rollout.x0.device)],
        conditioning=rollout.conditioning,
        slots=slots,
        samples=samples,
        halves=half_of_slot[slots],
        sigmas=levels[torch.stack(orders)],
        seed=seed,
        step=step,
    )


@dataclass(frozen=True)
class PolicyGradients:
    """Gradients of an update, and the means of the losses behind them."""

    gradients: RewardGradients
    base: float
    """mean base: the loss at advantage 0"""
    kl: float
    """mean ||v_theta - v_ref||^2, without its weight; 0 where the weight is 0"""
    slopes: Tensor
    """[J] float64: mean A_j * slope, what each column adds to the loss"""

    @property
    def is_finite(self) -> bool:
        parts = [self.gradients.gram.flatten(), self.gradients.shared.to(torch.float64).norm()[None], self.slopes]
        losses = math.isfinite(self.base) and math.isfinite(self.kl)
        return losses and all(bool(torch.isfinite(part).all()) for part in parts)


def policy_gradients(
    model: DiffusionModel,
    policy: LoraPolicy,
    batch: TrainingBatch,
    columns: Tensor,
    config: LossConfig,
    *,
    per_column: bool,
    micro_batch: int,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> PolicyGradients:
    """Gradients for the advantage columns [N, J], clamped.

    ``per_column``: one gradient for each column, base and KL in ``shared``. Otherwise all in ``shared`` by a single
    backward pass (then J must be 1).
    """
    assert per_column or columns.shape[1] == 1, "a single backward pass takes a single advantage"
    accumulator = GradientAccumulator(columns.shape[1] if per_column else 0, policy.parameters)
    totals = torch.zeros(2 + columns.shape[1], dtype=torch.float64)
    device = batch.x0.device
    for rows in batch.micro_batches(micro_batch):
        conditioning = batch.conditioning.rows(batch.slots[rows].to(device))
        x0 = batch.x0[rows.to(device)]
        advantages = columns[rows].to(device, torch.float32)
        for level in range(batch.sigmas.shape[1]):
            sigma = batch.sigmas[rows, level].to(device)
            weight = sigma.reshape(-1, *[1] * (x0.ndim - 1))
            x_t = (1 - weight) * x0 + weight * batch.noise(rows, level).to(device)

            # The trained policy comes last: selecting another adapter after its forward pass loses gradients.
            v_ref = None
            if config.kl_weight > 0:
                with policy.acting_as("base"):
                    v_ref = model.velocity(x_t, sigma, conditioning)
            with policy.acting_as(OLD):
                v_old = model.velocity(x_t, sigma, conditioning)
            v_theta = model.velocity(x_t, sigma, conditioning)

            loss = nft_loss(v_theta, v_old, x0, x_t, sigma, beta=config.beta, adv_clip=config.adv_clip)
            kl = torch.zeros_like(loss.base) if v_ref is None else reference_divergence(v_theta, v_ref)
            outside = loss.base + config.kl_weight * kl
            if per_column:
                accumulator.add(loss.slope, outside, advantages, batch.halves[rows])
            else:
                accumulator.add(None, outside + advantages[:, 0] * loss.slope, None)

            parts = torch.cat([loss.base[:, None], kl[:, None], advantages * loss.slope[:, None]], dim=1)
            totals += parts.detach().sum(0).to("cpu", torch.float64)
            on_rows(len(rows))
    means = totals / batch.sigmas.numel()
    return PolicyGradients(accumulator.finish(), base=float(means[0]), kl=float(means[1]), slopes=means[2:])
