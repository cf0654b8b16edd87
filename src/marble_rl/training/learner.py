"""Stages 5 to 8 for one optimizer update, and all the state that they change.

losses -> gradients -> coefficients -> update
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from marble_rl.advantages import Scored
from marble_rl.balancing.base import Guarding, Weighing, weight_vector
from marble_rl.balancing.registry import RULES
from marble_rl.config import RunConfig
from marble_rl.distributed.world import World
from marble_rl.errors import InputError, NonFiniteGradient, count_of
from marble_rl.gradients.accumulate import FusedMismatch, RewardGradients
from marble_rl.gradients.halves import SAMPLED
from marble_rl.losses.registry import LOSSES
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.runs.checkpoint import RULE, Checkpoint
from marble_rl.runs.log import Display
from marble_rl.storage import save_safetensors, storage_errors
from marble_rl.training.batch import TrainingBatch, training_batch, training_levels
from marble_rl.training.harmony import Signal, agreement_of_halves
from marble_rl.training.loss_scale import LossScale
from marble_rl.training.metrics import by_name, refresh_metrics
from marble_rl.training.policy_gradients import GradientStage, PolicyGradients
from marble_rl.training.skips import Skips
from marble_rl.training.update import Updater
from marble_rl.types import Metrics, Rollout


@dataclass(frozen=True)
class Proposal:
    """An update that has been computed and not applied. `Learner.apply` applies it and commits the new state."""

    gradient: Tensor
    """[P]"""
    loss: float
    figures: Metrics
    rule_state: Any
    """New state of the balancing rule, for `commit`"""
    signal: Signal


class Learner:
    """The trained policy with its loss, balancing rule, optimizer and their state."""

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
        """``dumps``: folder where a batch is saved if its loss or gradient is not finite."""
        self.config = config
        self.policy = policy
        self.world = world
        self.names = config.trained_rewards
        self.rule = RULES.part_of(config.balance)(
            config.balance,
            self.names,
            adv_clip=config.loss.adv_clip,
            seed=config.trainer.seed,
            priorities=config.priorities,
            rewards_off=config.rewards_off,
            guards=tuple(config.guards),
        )
        self.loss = LOSSES.part_of(config.loss)(config.loss)
        size = config.rollout
        shape = model.latent_shape(size.height, size.width, size.frames)
        training_levels(self.loss, model.sigmas(size.steps, shape), model.experts)  # refused before a rollout
        self._model = model
        self.signal = Signal.unknown(len(self.names))
        self.scale = LossScale(model.dtype)
        self.skips = Skips(config.optimizer.non_finite == "skip")
        samples = config.rollout.groups // config.rollout.updates * config.rollout.group_size
        self.micro_batch = MicroBatch(config.trainer.micro_batch, samples, say)
        self.gradients = GradientStage(model, policy, self.loss, self.micro_batch, self.scale, world)
        self.updater = Updater(policy, config.optimizer, config.rollout.old_policy_decay, config.trainer.steps)
        self._dumps = dumps
        self._say = say
        self._passes_reported = False

    def batch(self, rollout: Rollout, update: int) -> TrainingBatch:
        """The rollout's samples for its ``update``-th optimizer update, which comes next."""
        drawn = {"seed": self.config.trainer.seed, "step": self.step}
        return training_batch(rollout, update, self.loss, **drawn, expert_of=self._model.experts)

    def propose(
        self,
        batch: TrainingBatch,
        scored: Scored,
        rows: Sequence[int],
        display: Display,
        rates: Mapping[str, float] | None = None,
    ) -> Proposal:
        """Compute an update. ``rows``: rows of the batch's samples in ``scored``. ``rates``: by guard, how it may
        change (floors.py). Raises NonFiniteGradient.

        Weights, optimizer, rule and signal stay as they are. Only the loss scale and the micro-batch size may be
        lowered, after an overflow or an out-of-memory error.
        """
        if self.rule.needs_gradients(self.step):
            return self._balanced(batch, scored, rows, display, rates)
        return self._combined(batch, scored, rows, display)

    def apply(self, proposal: Proposal, last_of_rollout: bool) -> Metrics:
        """Apply the update; after the last update of a rollout, also update the old policy."""
        norm = self.updater.apply(proposal.gradient, proposal.loss, self.step)
        with self.updater.changing():  # without the rule's new state, the new weights must not be saved
            self.rule.commit(proposal.rule_state)
        self.signal = proposal.signal
        guards = {**self.scale.figures, **self.skips.figures}
        self.step += 1
        self.scale.update_done()
        self.skips.update_done()
        if last_of_rollout:
            self.updater.update_old_policy(self.step)
        return {"update/norm": norm, **guards}

    def _combined(self, batch: TrainingBatch, scored: Scored, rows: Sequence[int], display: Display) -> Proposal:
        """An ordinary step: one advantage, one backward pass (docs/method.md, section 3, step 7)."""
        combination = self.rule.combine(self.step, scored)
        with display.stage("gradients"):
            result = self.gradients.combined(batch, combination.advantage[rows], self._progress(batch, display))
        self._check_finite(result, batch)
        loss = result.base + float(result.slopes[0])
        figures = self._loss_figures(loss, result, combination.coefficients)
        return Proposal(result.gradients.shared, loss, figures, combination.state, self.signal)

    def _balanced(
        self,
        batch: TrainingBatch,
        scored: Scored,
        rows: Sequence[int],
        display: Display,
        rates: Mapping[str, float] | None,
    ) -> Proposal:
        """A refresh: one gradient per reward, weighted into one (docs/method.md, section 3, steps 2-6)."""
        k = len(self.names)
        result = self._reward_gradients(batch, scored, rows, display)
        gradients = result.gradients
        with display.stage("coefficients"):
            weighing = self._weighing(gradients.first(k), rates)
            signal = self._signal_after(gradients.first(k), weighing)
            rule = weighing.for_half or self.rule.weights_for
            figures = refresh_metrics(self.names, gradients, weighing, signal, rule)
        gradient = weighing.weights.to(gradients.g) @ gradients.g[:k] + gradients.shared
        loss = result.base + float(weighing.weights @ result.slopes[:k])
        figures = {**self._loss_figures(loss, result, weighing.coefficients), **figures}
        return Proposal(gradient, loss, figures, weighing.state, signal)

    def _signal_after(self, gradients: RewardGradients, weighing: Weighing) -> Signal:
        if weighing.elsewhere is not None:
            unbiased = weighing.elsewhere.unbiased
        elif gradients.half_gram is not None:
            unbiased = agreement_of_halves(gradients.half_gram.cpu())
        else:
            return self.signal
        return self.signal.after(gradients.gram.diagonal().cpu(), unbiased)

    def _weighing(self, gradients: RewardGradients, rates: Mapping[str, float] | None) -> Weighing:
        if self.config.guards and isinstance(self.rule, Guarding):
            return self.rule.weigh(self.step, gradients, rates)
        return self.rule.weigh(self.step, gradients)

    def _reward_gradients(
        self, batch: TrainingBatch, scored: Scored, rows: Sequence[int], display: Display
    ) -> PolicyGradients:
        """Gradients of the K rewards and, as the last column, of the weighted-sum probe."""
        probe = scored.weighted_sum(weight_vector(self.names, self.rule.sum_weights(self.config.balance)))
        columns = torch.cat([scored.advantages, probe[:, None]], dim=1)[rows]
        with display.stage("gradients"):
            try:
                result = self.gradients.per_reward(
                    batch,
                    columns,
                    method=self.rule.gradient_method,
                    verify=True,
                    halves_on=SAMPLED if self.rule.keeps_halves else 0,
                    on_rows=self._progress(batch, display),
                )
            except FusedMismatch as mismatch:
                raise InputError(
                    f"balance.gradients: fused gives a wrong gradient of {self.policy.names[mismatch.position]}, "
                    "because samples are not the layer's leading dimension. Set balance.gradients: passes"
                ) from None
        self._check_finite(result, batch)
        if result.gradients.by_passes and not self._passes_reported:
            self._passes_reported = True
            self._report_passes(result.gradients.by_passes)
        return result

    def _progress(self, batch: TrainingBatch, display: Display) -> Callable[[int], None]:
        """A callback that moves the progress bar through the second half of a step."""
        rows_done, total = 0, batch.sigmas.numel()

        def on_rows(rows: int) -> None:
            nonlocal rows_done
            rows_done += rows
            display.within(self.step, 0.5 + 0.5 * rows_done / total)

        return on_rows

    def _report_passes(self, positions: tuple[int, ...]) -> None:
        names = [self.policy.names[i] for i in positions]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        self._say(
            f"one backward pass per reward for {count_of(len(names), 'parameter')} outside of fused layers: {shown}"
        )

    def _check_finite(self, result: PolicyGradients, batch: TrainingBatch) -> None:
        """Raise NonFiniteGradient before any coefficient or weight changes."""
        if not result.is_finite:
            self._raise_non_finite(batch)

    def _raise_non_finite(self, batch: TrainingBatch) -> NoReturn:
        suffix = f"-rank-{self.world.rank}" if self.world.size > 1 else ""
        path = self._dumps / f"nonfinite-step-{self.step + 1}{suffix}.safetensors"
        tensors = {"x0": batch.x0, "sigmas": batch.sigmas, "slots": batch.slots, "samples": batch.samples}
        with storage_errors(str(path)):
            save_safetensors(path, tensors, {"step": str(self.step)})
        raise NonFiniteGradient(
            f"step {self.step + 1}: a loss or gradient is not finite; the update was not applied. "
            f"Lower optimizer.lr, or look at the batch in {path}"
        )

    def _loss_figures(self, loss: float, result: PolicyGradients, coefficients: Tensor | None) -> Metrics:
        figures = {"loss/policy": loss, "loss/kl": result.kl}
        return figures if coefficients is None else figures | by_name("alpha_bar", self.names, coefficients)

    def checkpoint(self, **others: Any) -> Checkpoint:
        """The learner's state, with ``others`` (small JSON values) added to it."""
        adapters = {f"{a}/{name}": t for a in ADAPTERS for name, t in self.policy.tensors(a).items()}
        state = {
            "balancer": self.rule.state_dict(),
            "signal": self.signal.state_dict(),
            "scale": self.scale.state_dict(),
            "skipped": self.skips.total,
            "micro_batch": self.micro_batch.state_dict(),
            **others,
        }
        momenta = {f"{RULE}{name}": tensor for name, tensor in self.rule.tensors().items()}
        return Checkpoint(self.step, adapters, {**self.updater.optimizer_tensors(), **momenta}, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        self.step = checkpoint.step
        for adapter in ADAPTERS:
            self.policy.load_tensors(adapter, checkpoint.adapter(adapter))
        self.updater.load_optimizer_tensors(checkpoint.moments)
        self.rule.load_tensors(checkpoint.of_the_rule)
        self.rule.load_state_dict(checkpoint.state["balancer"])
        self.signal = Signal.from_state(checkpoint.state["signal"])
        self.scale.load_state_dict(checkpoint.state.get("scale", {}))
        self.skips.total = checkpoint.state.get("skipped", 0)
        self.micro_batch.load_state_dict(checkpoint.state.get("micro_batch", {}))
