"""Stages 5 and 6 for one optimizer update: predictions, losses and gradients, micro-batch by micro-batch.

A row is one (sample, timestep). Its noise is drawn by name, so the sum over rows is the same however they are cut into
micro-batches, and whichever process takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marble_rl.config.schema import LossConfig
from marble_rl.distributed import World
from marble_rl.gradients.accumulate import GradientAccumulator, Method, RewardGradients
from marble_rl.gradients.metric import Metric
from marble_rl.losses.nft import AffineLoss, nft_loss, reference_divergence
from marble_rl.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel
from marble_rl.models.lora import OLD, TRAINED, LoraPolicy
from marble_rl.precision import unscaled
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


@dataclass(frozen=True)
class PolicyGradients:
    """Gradients of an update, and the means of the losses behind them."""

    gradients: RewardGradients
    base: float
    """mean base: the loss at advantage 0"""
    kl: float
    """mean ||v_theta - v_ref||^2, without its weight; 0 where the weight is 0, an estimate if regularised lazily"""
    slopes: Tensor
    """[J] float64: mean A_j * slope, what each column adds to the loss"""

    @property
    def losses_are_finite(self) -> bool:
        return math.isfinite(self.base) and math.isfinite(self.kl) and bool(torch.isfinite(self.slopes).all())

    @property
    def is_finite(self) -> bool:
        parts = [self.gradients.gram.flatten(), self.gradients.shared.to(torch.float64).norm()[None]]
        return self.losses_are_finite and all(bool(torch.isfinite(part).all()) for part in parts)


def policy_gradients(
    model: DiffusionModel,
    policy: LoraPolicy,
    batch: TrainingBatch,
    columns: Tensor,
    config: LossConfig,
    *,
    per_column: bool,
    micro_batch: int | MicroBatch,
    method: Method = "fused",
    verify: bool = False,
    scale: float = 1.0,
    metric: Metric | None = None,
    on_rows: Callable[[int], None] = lambda rows: None,
    world: World | None = None,
) -> PolicyGradients:
    """Gradients for the advantage columns [N, J], clamped: means over the samples of all processes of ``world``.

    ``per_column``: one gradient for each column, base and KL in ``shared``. Otherwise all in ``shared`` by a single
    backward pass (then J must be 1).

    Left out where it cannot change the result: the old policy's forward pass while it is the trained one (then
    grad base = 0), and the reference's where KL has no weight. With ``regularize_every`` = m, KL, and where it costs
    a backward pass of its own also base, are taken on one in m pieces, m-fold: the same on average.

    ``micro_batch``: samples a pass, or what finds their number. What it computes again where memory runs out is this
    process's own part; the processes meet after it, so that nobody exchanges anything twice.

    ``scale`` multiplies gradients on their way through the network, for float16 (precision.py); those returned are
    without it. ``metric``: take the products of the columns in it as well.
    """
    assert per_column or columns.shape[1] == 1, "a single backward pass takes a single advantage"
    world = world or World()
    on_policy = policy.equal(OLD, TRAINED)
    every = config.regularize_every
    turn = int(torch.randint(every, (), generator=generator(batch.seed, "regularize", batch.step)))

    def add(
        accumulator: GradientAccumulator, loss: AffineLoss, kl: Tensor | None, rows: Tensor, regularize: bool
    ) -> Tensor:
        """Differentiate a piece; [2 + J] sums of base, KL and A_j * slope over its rows."""
        advantages = columns[rows].to(batch.x0.device, torch.float32)
        kl = None if kl is None else every * kl
        if per_column:
            base = every * loss.base if regularize and not on_policy else None
            accumulator.add(loss.slope, _sum(base, kl, config.kl_weight), advantages, batch.halves[rows])
        else:
            loss_here = loss.base + advantages[:, 0] * loss.slope
            accumulator.add(None, _sum(loss_here, kl, config.kl_weight), None)
        parts = torch.cat([loss.base[:, None], advantages * loss.slope[:, None]], dim=1).detach().sum(0)
        sums = parts.to("cpu", torch.float64)
        kl_sum = sums.new_zeros(1) if kl is None else kl.detach().sum()[None].to(sums)
        return torch.cat([sums[:1], kl_sum, sums[1:]])

    losses = partial(_losses, model, policy, batch, config=config, on_policy=on_policy, scale=scale)

    def accumulate(size: int) -> tuple[GradientAccumulator, Tensor]:
        """This process's samples, ``size`` a pass: gradients, and the sums of ``add``."""
        accumulator = GradientAccumulator(
            columns.shape[1] if per_column else 0, policy.parameters, method, verify, world.lockstep, model.dtype
        )
        totals = torch.zeros(2 + columns.shape[1], dtype=torch.float64)
        for piece, rows, level in batch.pieces(size):
            regularize = piece % every == turn
            # No name here may hold the losses: the next piece's forward pass would find their graph still in memory.
            totals += add(accumulator, *losses(rows, level, regularize), rows, regularize)
            on_rows(len(rows))
        return accumulator, totals

    if isinstance(micro_batch, MicroBatch):
        accumulator, own = micro_batch.applied(accumulate)
    else:
        accumulator, own = accumulate(micro_batch)
    totals = accumulator.sum_over(world, own)
    means = totals / batch.total_rows
    gradients = unscaled(accumulator.finish(metric and metric.of_scaled(scale)), scale)
    return PolicyGradients(gradients, base=float(means[0]), kl=float(means[1]), slopes=means[2:])


def _losses(
    model: DiffusionModel,
    policy: LoraPolicy,
    batch: TrainingBatch,
    rows: Tensor,
    level: int,
    regularize: bool,
    *,
    config: LossConfig,
    on_policy: bool,
    scale: float,
) -> tuple[AffineLoss, Tensor | None]:
    """NFT's loss of the samples ``rows`` at their ``level``-th noise level, and where it is due their KL [B]."""
    device = batch.x0.device
    conditioning = batch.conditioning.rows(batch.groups[rows].to(device))
    x0 = batch.x0[rows.to(device)]
    sigma = batch.sigmas[rows, level].to(device)
    weight = sigma.reshape(-1, *[1] * (x0.ndim - 1))
    x_t = (1 - weight) * x0 + weight * batch.noise(rows, level).to(device)

    # The trained policy comes last: selecting another adapter after its forward pass loses gradients.
    v_ref = v_old = None
    if regularize and config.kl_weight > 0:
        with policy.acting_as("base"):
            v_ref = model.velocity(x_t, sigma, conditioning)
    if not on_policy:
        with policy.acting_as(OLD):
            v_old = model.velocity(x_t, sigma, conditioning)
    v_theta = model.velocity(x_t, sigma, conditioning)
    if scale != 1.0:
        v_theta.register_hook(lambda gradient: gradient * scale)
    if v_old is None:
        v_old = v_theta.detach()
    loss = nft_loss(v_theta, v_old, x0, x_t, sigma, beta=config.beta, adv_clip=config.adv_clip)
    return loss, None if v_ref is None else reference_divergence(v_theta, v_ref)


def _sum(loss: Tensor | None, kl: Tensor | None, kl_weight: float) -> Tensor | None:
    """loss + kl_weight * kl, of whichever there is."""
    if kl is None:
        return loss
    return kl_weight * kl if loss is None else loss + kl_weight * kl
