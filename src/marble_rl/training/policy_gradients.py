"""Stages 5 and 6 for one optimizer update: predictions, losses and gradients, micro-batch by micro-batch.

Each sample is trained at several noise levels. The noise of a (sample, level) pair is seeded by its indices, so the sum
over pairs does not depend on how they are split into micro-batches or over ranks. In the code ``rows`` are indices of
samples, and ``level`` is the index of a noise level in `TrainingBatch.sigmas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.devices import in_float64
from marble_rl.distributed.world import World
from marble_rl.gradients.accumulate import GradientAccumulator, Method, RewardGradients
from marble_rl.gradients.halves import SAMPLED
from marble_rl.losses.base import AffineLoss, Loss, reference_divergence
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel
from marble_rl.models.lora import OLD, TRAINED, LoraPolicy
from marble_rl.training.batch import TrainingBatch
from marble_rl.training.loss_scale import LossScale, unscaled


@dataclass(frozen=True)
class PolicyGradients:
    """Gradients of an update, and the means of the losses behind them."""

    gradients: RewardGradients
    base: float
    """mean base over the rows that were predicted: the loss at advantage 0"""
    kl: float
    """mean of `reference_divergence`, without its weight; 0 if the weight is 0, an estimate if regularize_every > 1"""
    slopes: Tensor
    """[J] float64: mean A_j * slope, what each column adds to the loss"""

    @property
    def losses_are_finite(self) -> bool:
        return math.isfinite(self.base) and math.isfinite(self.kl) and bool(torch.isfinite(self.slopes).all())

    @property
    def is_finite(self) -> bool:
        parts = [self.gradients.gram.flatten(), in_float64(self.gradients.shared).norm()[None]]
        return self.losses_are_finite and all(bool(torch.isfinite(part).all()) for part in parts)


@dataclass(frozen=True)
class _Request:
    """Which gradients of an update to compute."""

    batch: TrainingBatch
    columns: Tensor
    """[N, J]: J advantages for each sample"""
    per_column: bool
    """True: one gradient per column; base and KL are in ``shared``. False: J is 1, and the whole loss is in
    ``shared``"""
    on_policy: bool
    method: Method = "fused"
    verify: bool = False
    halves_on: int = SAMPLED
    on_rows: Callable[[int], None] = lambda rows: None


class GradientStage:
    """Computes the gradients of an update: means over the samples of all ranks.

    Forward passes that cannot change the result are skipped: that of the old policy if the loss does not need it, and
    that of the reference policy if KL has no weight. With ``regularize_every`` = m, KL (in refreshes also base) is
    computed on one in m samples and multiplied by m. Its expectation stays the same.

    Samples whose advantages are all zero, as in a group that its only reward scores alike, have no gradient but that of
    the shared part: where they have none of it either, they are not predicted at all. They count in all means.

    After a float16 overflow the gradients are computed again with a smaller loss scale, and after an out-of-memory
    error with a smaller micro-batch. A failed attempt changes no weights. Each rank retries by itself after an
    out-of-memory error; the all-reduce comes after that. Whether a gradient overflowed is known only after the
    all-reduce, so all ranks lower the loss scale together, and each scale that is tried has its own all-reduce.
    """

    def __init__(
        self,
        model: DiffusionModel,
        policy: LoraPolicy,
        loss: Loss,
        micro_batch: MicroBatch | int,
        scale: LossScale | None = None,
        world: World | None = None,
    ) -> None:
        self.model = model
        self.policy = policy
        self.loss = loss
        self.micro_batch = MicroBatch(micro_batch) if isinstance(micro_batch, int) else micro_batch
        self.scale = scale or LossScale(model.dtype)
        self.world = world or World()
        self._verified: set[int] = set()
        """Sizes of micro-batches whose fused gradients were compared with separate ones"""

    def combined(
        self, batch: TrainingBatch, advantage: Tensor, on_rows: Callable[[int], None] = lambda rows: None
    ) -> PolicyGradients:
        """The gradient of an ordinary step, from one advantage per sample [N]. All of it is in ``shared``."""
        return self._compute(_Request(batch, advantage[:, None], False, self._on_policy, on_rows=on_rows))

    def per_reward(
        self,
        batch: TrainingBatch,
        columns: Tensor,
        *,
        method: Method = "fused",
        verify: bool = False,
        halves_on: int = SAMPLED,
        on_rows: Callable[[int], None] = lambda rows: None,
    ) -> PolicyGradients:
        """One gradient for each column of advantages [N, J], and the shared gradient of base and KL.

        ``verify``: compare one fused gradient of each size of micro-batch with a separate backward pass.
        ``halves_on``: as for `GradientAccumulator`."""
        return self._compute(_Request(batch, columns, True, self._on_policy, method, verify, halves_on, on_rows))

    @property
    def _on_policy(self) -> bool:
        return self.policy.equal(OLD, TRAINED)

    def _compute(self, request: _Request) -> PolicyGradients:
        result = self.scale.with_retries(lambda scale: self._at_scale(request, scale))
        self.micro_batch.agree(self.world)
        return result

    def _at_scale(self, request: _Request, scale: float) -> PolicyGradients:
        accumulator, own = self.micro_batch.with_retries(lambda size: self._accumulate(request, scale, size))
        totals = accumulator.sum_over(self.world, own)
        rows, base, *_ = totals.tolist()
        means = totals[2:] / request.batch.total_rows
        gradients = unscaled(accumulator.finish(), scale)
        return PolicyGradients(gradients, base=base / max(rows, 1.0), kl=float(means[0]), slopes=means[1:])

    def _accumulate(self, request: _Request, scale: float, size: int) -> tuple[GradientAccumulator, Tensor]:
        """This rank's gradients, in micro-batches of ``size`` samples, and [3 + J] sums: the rows that were predicted,
        base, KL and A_j * slope."""
        batch, columns = request.batch, request.columns.shape[1]
        accumulator = GradientAccumulator(
            columns if request.per_column else 0,
            self.policy.parameters,
            request.method,
            self._verified if request.verify else None,
            self.world.lockstep,
            self.model.dtype,
            request.halves_on,
        )
        totals = torch.zeros(3 + columns, dtype=torch.float64)
        silent = self._silent(request)
        if silent is not None:
            accumulator.count(batch.halves[silent.nonzero()[:, 0]])
            request.on_rows(int(silent.sum()))
        for rows, level, regularize in batch.micro_batches(size, silent):
            # Do not assign the losses to a variable: their graph would stay in memory during the next forward pass.
            totals += self._differentiate(
                request, accumulator, *self._losses(request, rows, level, regularize, scale), rows, regularize
            )
            request.on_rows(len(rows))
        return accumulator, totals

    def _silent(self, request: _Request) -> Tensor | None:
        """[N, M] of the samples, at each noise level, without any gradient; None if there are none. None in lockstep
        either: all ranks make the same passes."""
        batch, shared_in_refreshes = request.batch, self.loss.base_has_gradient(request.on_policy)
        if self.world.lockstep or (shared_in_refreshes and not request.per_column):
            return None
        shared = self.loss.settings.kl_weight > 0 or shared_in_refreshes
        silent = ~request.columns.any(dim=1).cpu()[:, None] & ~(batch.regularized & shared)
        return silent if silent.any() else None

    def _losses(
        self, request: _Request, rows: Tensor, level: int, regularize: bool, scale: float
    ) -> tuple[AffineLoss, Tensor | None]:
        """The losses of the samples ``rows`` [B] at one noise level each, and their KL [B] if ``regularize`` is set."""
        sample, conditioning = request.batch.noised(rows, level)

        # The trained policy comes last: selecting another adapter after its forward pass loses gradients.
        v_ref = v_old = None
        if regularize and self.loss.settings.kl_weight > 0:
            with self.policy.acting_as("base"):
                v_ref = self.model.velocity(sample.x_t, sample.t, conditioning)
        if self.loss.needs_old(request.on_policy):
            with self.policy.acting_as(OLD):
                v_old = self.model.velocity(sample.x_t, sample.t, conditioning)
        v_theta = self.model.velocity(sample.x_t, sample.t, conditioning)
        if scale != 1.0:
            v_theta.register_hook(lambda gradient: gradient * scale)
        loss = self.loss.terms(v_theta, v_old, sample)
        return loss, None if v_ref is None else reference_divergence(v_theta, v_ref)

    def _differentiate(
        self,
        request: _Request,
        accumulator: GradientAccumulator,
        loss: AffineLoss,
        kl: Tensor | None,
        rows: Tensor,
        regularize: bool,
    ) -> Tensor:
        """Add the gradients of a micro-batch; returns [3 + J] sums over its samples: 1, base, KL and A_j * slope."""
        batch, settings = request.batch, self.loss.settings
        advantages = request.columns[rows].to(batch.x0.device, torch.float32)
        every = settings.regularize_every
        kl = None if kl is None else every * kl
        if request.per_column:
            include_base = regularize and self.loss.base_has_gradient(request.on_policy)
            base = every * loss.base if include_base else None
            accumulator.add(loss.slope, _sum(base, kl, settings.kl_weight), advantages, batch.halves[rows])
        else:
            whole = loss.base + advantages[:, 0] * loss.slope
            accumulator.add(None, _sum(whole, kl, settings.kl_weight), None)
        parts = torch.cat([loss.base[:, None], advantages * loss.slope[:, None]], dim=1).detach().sum(0)
        sums = parts.cpu().to(torch.float64)  # in this order: not every device has float64
        kl_sum = sums.new_zeros(1) if kl is None else kl.detach().sum()[None].cpu().to(sums)
        return torch.cat([torch.tensor([float(len(rows))]).to(sums), sums[:1], kl_sum, sums[1:]])


def _sum(loss: Tensor | None, kl: Tensor | None, kl_weight: float) -> Tensor | None:
    """loss + kl_weight * kl, leaving out what is None."""
    if kl is None:
        return loss
    return kl_weight * kl if loss is None else loss + kl_weight * kl
