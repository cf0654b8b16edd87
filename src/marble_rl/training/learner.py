"""Stages 5 to 8 for one optimizer update, and all the state that they change.

losses -> gradients -> coefficients -> update
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.balancing.balancers import build_balancer, weight_vector
from marble_rl.balancing.settings import MarbleBalance
from marble_rl.config import RunConfig
from marble_rl.distributed.world import World
from marble_rl.errors import InputError, NonFiniteGradient
from marble_rl.gradients.accumulate import FusedMismatch, Method
from marble_rl.gradients.metric import Metric
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.runs.checkpoint import Checkpoint
from marble_rl.runs.log import Display
from marble_rl.storage import save_safetensors, storage_errors
from marble_rl.training.batch import TrainingBatch
from marble_rl.training.harmony import SignalTracker
from marble_rl.training.metrics import by_name, refresh_metrics
from marble_rl.training.policy_gradients import PolicyGradients, policy_gradients
from marble_rl.training.precision import LossScale, Skips
from marble_rl.training.update import Updater
from marble_rl.types import Metrics


@dataclass(frozen=True)
class Proposal:
    """What an update would follow; nothing has moved yet but coefficients."""

    gradient: Tensor
    """[P]"""
    loss: float
    figures: Metrics


class Learner:
    """The trained policy, and what decides where it goes next."""

    step = 0
    """Optimizer updates done."""

    def __init__(
        self,
        config: RunConfig,
        model: DiffusionModel,
        policy: LoraPolicy,
        world: World,
        dumps: Path,
        say: Callable[[str], None],
    ) -> None:
        """``dumps``: folder for batches whose gradients are not finite."""
        self.config = config
        self.model = model
        self.policy = policy
        self.world = world
        self.names = config.trained_rewards
        self.balancer = build_balancer(config)
        self.signal = SignalTracker(len(self.names))
        self.scale = LossScale(model.dtype)
        self.skips = Skips(config.optimizer.non_finite == "skip")
        samples = config.rollout.groups // config.rollout.updates * config.rollout.group_size
        self.micro_batch = MicroBatch(config.trainer.micro_batch, samples, say)
        self.updater = Updater(policy, config.optimizer, config.rollout.old_policy_decay, config.trainer.steps)
        self._dumps = dumps
        self._say = say
        self._refreshed = False
        """A refresh was done in this process: its gradients were checked, and parameters left to passes named."""

    def propose(self, batch: TrainingBatch, scored: Scored, rows: range, display: Display) -> Proposal:
        """``rows``: the batch's samples in ``scored``. Raises NonFiniteGradient where the update can be skipped."""
        refresh = self.balancer.wants_reward_gradients(self.step)
        return (self._harmonised if refresh else self._combined)(batch, scored, rows, display)

    def apply(self, proposal: Proposal, last_of_rollout: bool) -> Metrics:
        """The update itself; after a rollout's last one the old policy follows."""
        norm = self.updater.apply(proposal.gradient, proposal.loss, self.step)
        guards = {**self.scale.figures, **self.skips.figures}
        self.step += 1
        self.scale.update_done()
        self.skips.update_done()
        if last_of_rollout:
            self.updater.follow(self.step)
        return {"update/norm": norm, **guards}

    @contextmanager
    def undone_unless_applied(self) -> Iterator[None]:
        """A step that fails before its update was made leaves coefficients and signal as it found them: it is made
        again, by a resumed run or with the next rollout."""
        step, balancer, signal = self.step, self.balancer.state_dict(), self.signal.state_dict()
        try:
            yield
        finally:
            if self.step == step:
                self.balancer.load_state_dict(balancer)
                self.signal.load_state_dict(signal)

    def _combined(self, batch: TrainingBatch, scored: Scored, rows: range, display: Display) -> Proposal:
        """An ordinary step: one advantage, one backward pass (docs/method.md, section 3, step 7)."""
        advantage = self.balancer.advantage(self.step, scored)[rows]
        result = self._gradients(batch, advantage[:, None], display, per_column=False)
        loss = result.base + float(result.slopes[0])
        return Proposal(result.gradients.shared, loss, self._loss_figures(loss, result))

    def _harmonised(self, batch: TrainingBatch, scored: Scored, rows: range, display: Display) -> Proposal:
        """A refresh: one gradient per reward, the QP, and one direction for all (steps 2-6)."""
        harmonizer, balance = self.balancer.harmonizer, self.config.balance
        assert harmonizer is not None
        assert isinstance(balance, MarbleBalance)
        k = len(self.names)
        probe = scored.weighted_sum(weight_vector(self.names, balance.probe_weights))
        columns = torch.cat([scored.advantages, probe[:, None]], dim=1)[rows]
        metric = Metric(k, self.updater.preconditioner) if balance.metric == "adam" else None
        result = self._gradients(batch, columns, display, per_column=True, method=balance.gradients, metric=metric)
        g = result.gradients
        balanced = g.in_metric or g.products
        with display.stage("coefficients"):
            cross = None if balanced.cross is None else balanced.cross[:k, :k]
            found = harmonizer.refresh(balanced.gram[:k, :k], cross)
            figures = refresh_metrics(self.names, g, found, self.signal, harmonizer.weights_for)
        gradient = found.weights.to(g.g) @ g.g[:k] + g.shared
        loss = result.base + float(found.weights @ result.slopes[:k])
        return Proposal(gradient, loss, {**self._loss_figures(loss, result), **figures})

    def _gradients(
        self,
        batch: TrainingBatch,
        columns: Tensor,
        display: Display,
        *,
        per_column: bool,
        method: Method = "fused",
        metric: Metric | None = None,
    ) -> PolicyGradients:
        rows_done, total = 0, batch.sigmas.numel()

        def on_rows(rows: int) -> None:
            nonlocal rows_done
            rows_done += rows
            display.within(self.step, 0.5 + 0.5 * rows_done / total)

        first = per_column and not self._refreshed
        compute = partial(
            policy_gradients,
            self.model,
            self.policy,
            batch,
            columns,
            self.config.loss,
            per_column=per_column,
            micro_batch=self.micro_batch,
            method=method,
            verify=first,
            metric=metric,
            on_rows=on_rows,
            world=self.world,
        )
        with display.stage("gradients"):
            try:
                result = self.scale.applied(compute)
            except FusedMismatch as mismatch:
                raise InputError(
                    f"balance.gradients: fused gives a wrong gradient of {self.policy.names[mismatch.position]}, "
                    "because samples are not the layer's leading dimension. Set balance.gradients: passes"
                ) from None
            self.micro_batch.agree(self.world)
        if not result.is_finite:
            self._stop_non_finite(batch)
        if first:
            self._refreshed = True
            self._report_passes(result.gradients.by_passes)
        return result

    def _report_passes(self, positions: tuple[int, ...]) -> None:
        if positions:
            names = [self.policy.names[i] for i in positions]
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            self._say(f"one backward pass per reward for {len(names)} parameters that no fused layer serves: {shown}")

    def _stop_non_finite(self, batch: TrainingBatch) -> NoReturn:
        """Before anything is changed by it: no coefficient, no weight."""
        share = f"-process-{self.world.rank}" if self.world.size > 1 else ""
        path = self._dumps / f"nonfinite-step-{self.step}{share}.safetensors"
        tensors = {"x0": batch.x0, "sigmas": batch.sigmas, "slots": batch.slots, "samples": batch.samples}
        with storage_errors(str(path)):
            save_safetensors(path, tensors, {"step": str(self.step)})
        raise NonFiniteGradient(
            f"step {self.step}: a loss or gradient is not finite; the update was not applied. "
            f"Lower optimizer.lr, or look at the batch in {path}"
        )

    def _loss_figures(self, loss: float, result: PolicyGradients) -> Metrics:
        figures = {"loss/policy": loss, "loss/kl": result.kl}
        coefficients = self.balancer.coefficients(self.step)
        return figures if coefficients is None else figures | by_name("alpha_bar", self.names, coefficients)

    def checkpoint(self, **others: Any) -> Checkpoint:
        """Everything here, and the small JSON values of ``others``."""
        adapters = {f"{a}/{name}": t for a in ADAPTERS for name, t in self.policy.tensors(a).items()}
        state = {
            "balancer": self.balancer.state_dict(),
            "signal": self.signal.state_dict(),
            "scale": self.scale.state_dict(),
            "skipped": self.skips.total,
            "micro_batch": self.micro_batch.state_dict(),
            **others,
        }
        return Checkpoint(self.step, adapters, self.updater.optimizer_tensors(), state)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.step = checkpoint.step
        for adapter in ADAPTERS:
            self.policy.load_tensors(adapter, checkpoint.adapter(adapter))
        self.updater.load_optimizer_tensors(checkpoint.optimizer)
        self.balancer.load_state_dict(checkpoint.state["balancer"])
        self.signal.load_state_dict(checkpoint.state["signal"])
        self.scale.load_state_dict(checkpoint.state.get("scale", {}))
        self.skips.total = checkpoint.state.get("skipped", 0)
        self.micro_batch.load_state_dict(checkpoint.state.get("micro_batch", {}))
