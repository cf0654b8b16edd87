"""Stages 5 and 6 for one optimizer update: predictions, losses and gradients, micro-batch by micro-batch.

A row is one (sample, timestep). Its noise is drawn by name, so the sum over rows is the same however they are cut into
micro-batches, and whichever process takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from marble_rl.distributed.world import World
from marble_rl.gradients.accumulate import GradientAccumulator, Method, RewardGradients
from marble_rl.gradients.metric import Metric
from marble_rl.losses.nft import AffineLoss, nft_loss, reference_divergence
from marble_rl.losses.settings import LossConfig
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel
from marble_rl.models.lora import OLD, TRAINED, LoraPolicy
from marble_rl.seeding import generator
from marble_rl.training.batch import TrainingBatch
from marble_rl.training.precision import unscaled


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
