"""The training loop. It reads like the list of the stages:

prompts -> rollout -> rewards -> advantages -> gradients -> coefficients -> update -> log, checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from torch import Tensor

from marble_rl.checkpoint import Checkpoint, load_newest, restoring, save_checkpoint
from marble_rl.coefficients.balancers import Balancer, Scored, build_balancer, weight_vector
from marble_rl.config import RunConfig
from marble_rl.config.schema import MarbleBalance
from marble_rl.config.trackers import TrackerConfig
from marble_rl.distributed import World, check_same_rewards, check_same_weights, check_world, join
from marble_rl.errors import (
    InputError,
    LostProcess,
    MarbleError,
    NonFiniteGradient,
    RewardExploited,
    RunStopped,
    StorageFailed,
)
from marble_rl.evaluate import evaluate
from marble_rl.experience import Experience, ExperienceSource, draw_grid
from marble_rl.gradients.accumulate import FusedMismatch, Method
from marble_rl.gradients.metric import Metric
from marble_rl.gradients.policy import PolicyGradients, TrainingBatch, policy_gradients, training_batch
from marble_rl.harmony import SignalTracker
from marble_rl.inputs import check_inputs
from marble_rl.interrupts import Interrupts
from marble_rl.memory import peak_bytes
from marble_rl.metrics import (
    Metrics,
    by_name,
    clip_metrics,
    refresh_metrics,
    reward_metrics,
    scoring_metrics,
    summed_counts,
)
from marble_rl.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import ADAPTERS, EMA, LoraPolicy
from marble_rl.out_of_memory import memory_errors
from marble_rl.precision import LossScale, Skips
from marble_rl.rewards.calls import Counts
from marble_rl.runfolder import RunFolder
from marble_rl.runlog import Display, MetricsFile
from marble_rl.sharding import check_sharding, kept_here, load_base
from marble_rl.storage import save_safetensors, storage_errors
from marble_rl.trackers import Trackers, check_trackers
from marble_rl.types import Rollout
from marble_rl.update import Updater
from marble_rl.watch import HackingWatch


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves behind."""

    out: Path
    steps: int
    lora: Path
    """Folder that plain diffusers' ``load_lora_weights`` reads: the EMA weights."""
    metrics: Metrics
    """Of the last step taken; empty where nothing was left to do."""


class Trainer:
    """Trains one run. Everything that the config can get wrong is found here, before a model is loaded."""

    # Set by _load, once the config was found good.
    step: int
    """Optimizer updates done."""
    model: DiffusionModel
    policy: LoraPolicy
    prompt_cache: PromptCache
    balancer: Balancer
    updater: Updater
    signal: SignalTracker
    scale: LossScale
    skips: Skips
    micro_batch: MicroBatch
    _display: Display
    _metrics_file: MetricsFile | None
    """Of the first process alone."""
    _trackers: Trackers
    _source: ExperienceSource
    _experience: Experience | None
    _watches: dict[str, HackingWatch]
    _counts: dict[str, Counts]
    """What each reward had done when the last line was logged."""
    _waited: float
    """Seconds that other processes had been waited for when the last line was logged."""
    _refreshed: bool
    """A refresh was done in this process: its gradients were checked, and parameters left to passes named."""

    def __init__(
        self,
        config: RunConfig,
        out: Path | None = None,
        *,
        resume: bool = False,
        console: Console | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.folder = RunFolder(out or Path("runs") / f"{config.balance.type}-seed{config.trainer.seed}")
        self.world = world or join()
        self.console = console or Console(stderr=True)
        if not self.world.first:
            self.console = Console(quiet=True)
        self.names = config.trained_rewards
        with self.world.agreed():
            self._inputs = check_inputs(config)
            check_world(self.world, config.rollout.groups, config.rollout.updates)
            check_sharding(config, self.world)
            self._device = self.world.pick_device(config.model.device)
            self._inputs.scorer.check_devices()
            check_trackers(self._tracker_settings)
            self._remarks = self.folder.check_start(config, resume) if self.world.first else []

    def train(self) -> RunResult:
        """Run to the last step; raises RunStopped or Interrupted with everything saved."""
        steps = self.config.trainer.steps
        metrics: Metrics = {}
        interrupts = Interrupts(self._say, agree=self.world.largest, launched=self.world.size > 1)
        with self.folder.opened(self.config, self.world), interrupts:
            with self.world.agreed(), self._memory_errors(lambda: "loading"):
                self._load()
            if interrupts.pending():
                interrupts.stop("stopped before the first step; continue with --resume")
            with self._trackers, self._display:
                while self.step < steps:
                    try:
                        with self.world.agreed(), self._memory_errors(lambda: self._display.current_stage):
                            metrics = self._take_step()
                        finished, stopping = self.step == steps, interrupts.pending()
                        if finished or stopping or self.step % self.config.trainer.save_every == 0:
                            self._save()
                    except RunStopped as stop:
                        self._save_before_stopping(stop)
                        raise
                    if stopping and not finished:
                        interrupts.stop(f"stopped after step {self.step}; continue with --resume")
            with self.world.agreed():
                self._write_lora()
        return RunResult(self.folder.path, self.step, self.folder.lora, metrics)

    def _take_step(self) -> Metrics:
        """One optimizer update; where one is skipped, the next rollout's."""
        while True:
            try:
                with self._undone_before_the_update():
                    return self._try_step()
            except NonFiniteGradient as bad:
                self.skips.skip(bad)
                self._say(f"skipped: {bad}")
            # Outside of the handler: the error's traceback held on to the rollout and its gradients.
            self._experience = None

    def _try_step(self) -> Metrics:
        """One optimizer update; raises NonFiniteGradient where it can be skipped."""
        step, c = self.step, self.config
        index, update = divmod(step, c.rollout.updates)
        if self._experience is None:
            self._experience = self._source.gather(index + self.skips.total, step, self._display)
            self._draw_images(self._experience.rollout)
        experience, rollout = self._experience, self._experience.rollout

        batch = training_batch(rollout, update, c.loss, seed=c.trainer.seed, step=step)
        if self.balancer.wants_reward_gradients(step):
            gradient, loss, figures = self._harmonised(batch, experience.scored, rollout.table_rows(update))
        else:
            gradient, loss, figures = self._combined(batch, experience.scored, rollout.table_rows(update))

        rows = rollout.table_rows(update, everyone=True)
        metrics = {
            **reward_metrics(experience.table.rows(rows)),
            **clip_metrics(experience.table.rows(rows), experience.scored.table.rows(rows)),
            **figures,
            "guard/clamped": float(experience.clamped[rows].sum()),
            **self.scale.figures,
            **self.skips.figures,
        }
        with self._display.stage("update"):
            metrics["update/norm"] = self.updater.apply(gradient, loss, step)
            self.step += 1
            self.scale.update_done()
            self.skips.update_done()
            if update + 1 == c.rollout.updates:
                self.updater.follow(self.step)
                self._experience = None
        alarms: dict[str, str] = {}
        if self._experience is None:
            alarms = self._watch(experience)
            metrics |= experience.watched | {f"guard/watch/{name}": float(name in alarms) for name in self._watches}
        try:
            with self.world.agreed(), self._memory_errors(lambda: "evaluate"):
                metrics |= self._evaluate_if_due()
        except MarbleError:  # known to all processes: the step is done, and logged without its evaluation
            self._log(step, metrics)
            raise
        self._log(step, metrics)
        self._sound(alarms)
        return metrics

    @contextmanager
    def _undone_before_the_update(self) -> Iterator[None]:
        """A step that fails before its update was made leaves coefficients and signal as it found them: it is made
        again, by a resumed run or with the next rollout."""
        step, balancer, signal = self.step, self.balancer.state_dict(), self.signal.state_dict()
        try:
            yield
        finally:
            if self.step == step:
                self.balancer.load_state_dict(balancer)
                self.signal.load_state_dict(signal)

    # Stages 5-7, either way: the gradient of the step, its loss, and figures for the log.

    def _combined(self, batch: TrainingBatch, scored: Scored, rows: range) -> tuple[Tensor, float, Metrics]:
        """An ordinary step: one advantage, one backward pass (docs/method.md, section 3, step 7)."""
        advantage = self.balancer.advantage(self.step, scored)[rows]
        result = self._gradients(batch, advantage[:, None], per_column=False)
        loss = result.base + float(result.slopes[0])
        return result.gradients.shared, loss, self._loss_figures(loss, result)

    def _harmonised(self, batch: TrainingBatch, scored: Scored, rows: range) -> tuple[Tensor, float, Metrics]:
        """A refresh: one gradient per reward, the QP, and one direction for all (steps 2-6)."""
        harmonizer, balance = self.balancer.harmonizer, self.config.balance
        assert harmonizer is not None
        assert isinstance(balance, MarbleBalance)
        k = len(self.names)
        probe = scored.weighted_sum(weight_vector(self.names, balance.probe_weights))
        columns = torch.cat([scored.advantages, probe[:, None]], dim=1)[rows]
        metric = Metric(k, self.updater.preconditioner) if balance.metric == "adam" else None
        result = self._gradients(batch, columns, per_column=True, method=balance.gradients, metric=metric)
        g = result.gradients
        balanced = g.in_metric or g.products
        with self._display.stage("coefficients"):
            cross = None if balanced.cross is None else balanced.cross[:k, :k]
            found = harmonizer.refresh(balanced.gram[:k, :k], cross)
            figures = refresh_metrics(self.names, g, found, self.signal, harmonizer.weights_for)
        gradient = found.weights.to(g.g) @ g.g[:k] + g.shared
        loss = result.base + float(found.weights @ result.slopes[:k])
        return gradient, loss, {**self._loss_figures(loss, result), **figures}

    def _gradients(
        self,
        batch: TrainingBatch,
        columns: Tensor,
        *,
        per_column: bool,
        method: Method = "fused",
        metric: Metric | None = None,
    ) -> PolicyGradients:
        rows_done, total = 0, batch.sigmas.numel()

        def on_rows(rows: int) -> None:
            nonlocal rows_done
            rows_done += rows
            self._display.within(self.step, 0.5 + 0.5 * rows_done / total)

        first = per_column and not self._refreshed
        with self._display.stage("gradients"):
            try:
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
                result = self.scale.applied(compute)
                self.micro_batch.agree(self.world)
            except FusedMismatch as mismatch:
                raise InputError(
                    f"balance.gradients: fused gives a wrong gradient of {self.policy.names[mismatch.position]}, "
                    "because samples are not the layer's leading dimension. Set balance.gradients: passes"
                ) from None
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
        path = self.folder.path / f"nonfinite-step-{self.step}{share}.safetensors"
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

    # Around the loop

    @property
    def _tracker_settings(self) -> list[TrackerConfig]:
        """One process tells what all of them do."""
        return self.config.logging.trackers if self.world.first else []

    def _load(self) -> None:
        """Models, and the state of an earlier part of this run where there is one."""
        c = self.config
        for remark in (*self._remarks, *self._inputs.remarks):
            self._say(remark)
        # One process reads it, and sends it to the others: they cannot see different ones.
        found = load_newest(self.folder.checkpoints, self._say) if self.world.first else None
        checkpoint = self.world.from_first(found)
        self.step = checkpoint.step if checkpoint else 0
        if checkpoint:
            self._say(f"continuing after step {checkpoint.step}")
        with self.console.status("loading models"):
            self.model = load_base(c, self._device, self.world)
            self.model.check_trainable()
            self.policy = LoraPolicy(self.model.transformer, c.lora, self.model.lora_targets, c.trainer.seed)
            remarks = self._inputs.scorer.load(self._device)
            check_same_rewards(self.world, self._inputs.scorer.names)
            # Once more: a reward on another machine could not be asked before, nor a model on the hub.
            self._inputs.scorer.check_media(self.model.media())
            self._inputs.scorer.check_applicability(self.names, self._inputs.train.prompts)
        if self.world.lockstep:
            own, whole = kept_here(self.model.transformer)
            remarks.append(f"base model sharded: {own:,} of {whole:,} parameters in this process")
        for remark in remarks:
            self._say(remark)
        self.prompt_cache = PromptCache(self.model)
        self.balancer = build_balancer(c)
        self.signal = SignalTracker(len(self.names))
        self.scale = LossScale(self.model.dtype)
        self.skips = Skips(c.optimizer.non_finite == "skip")
        samples = c.rollout.groups // c.rollout.updates * c.rollout.group_size
        self.micro_batch = MicroBatch(c.trainer.micro_batch, samples, self._say)
        self._watches = {n: HackingWatch(n, self.names, watch.window) for n, watch in c.watched_rewards.items()}
        self._counts = self._inputs.scorer.counts()
        self.updater = Updater(self.policy, c.optimizer, c.rollout.old_policy_decay, c.trainer.steps)
        if checkpoint:
            with restoring(checkpoint, self.folder.path):
                self._restore(checkpoint)
        self._experience = None
        self._refreshed = False
        self._waited = self.world.waited
        self._source = ExperienceSource(c, self._inputs, self.model, self.policy, self.prompt_cache, self.world)
        self._metrics_file = MetricsFile(self.folder.metrics, self.step) if self.world.first else None
        logged = 0 if self._metrics_file is None else self._metrics_file.logged
        self._trackers = Trackers(self._tracker_settings, self.folder.path, c, self.step, logged, self._say)
        self._display = Display(self.console, c.trainer.steps, self.step, self.names, c.logging.print_every)

    def _restore(self, checkpoint: Checkpoint) -> None:
        for adapter in ADAPTERS:
            self.policy.load_tensors(adapter, checkpoint.adapter(adapter))
        self.updater.load_optimizer_tensors(checkpoint.optimizer)
        self.balancer.load_state_dict(checkpoint.state["balancer"])
        self.signal.load_state_dict(checkpoint.state["signal"])
        self.scale.load_state_dict(checkpoint.state.get("scale", {}))
        self.skips.total = checkpoint.state.get("skipped", 0)
        self.micro_batch.load_state_dict(checkpoint.state.get("micro_batch", {}))
        for name, state in checkpoint.state.get("watches", {}).items():
            if name in self._watches:
                self._watches[name].load_state_dict(state)

    def _state(self) -> Checkpoint:
        adapters = {f"{a}/{name}": t for a in ADAPTERS for name, t in self.policy.tensors(a).items()}
        state = {
            "balancer": self.balancer.state_dict(),
            "signal": self.signal.state_dict(),
            "scale": self.scale.state_dict(),
            "skipped": self.skips.total,
            "micro_batch": self.micro_batch.state_dict(),
            "watches": {name: watch.state_dict() for name, watch in self._watches.items()},
        }
        return Checkpoint(self.step, adapters, self.updater.optimizer_tensors(), state)

    def _save(self) -> None:
        """Wait for the first process, which writes for all."""
        with self.world.agreed(), self._display.stage("checkpoint"):
            check_same_weights(self.world, self.policy.flat)
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        if self.world.first and self.updater.intact:
            save_checkpoint(self.folder.checkpoints, self._state(), self.config.trainer.keep_checkpoints)

    def _save_before_stopping(self, stop: RunStopped) -> None:
        """The weights are those after the last complete step; where the disk refuses, or an update was left half-made,
        the last checkpoint stays."""
        if isinstance(stop, LostProcess):
            self._write_checkpoint()
        elif not isinstance(stop, StorageFailed):
            with self.world.agreed():
                self._write_checkpoint()

    def _write_lora(self) -> None:
        if self.world.first:
            with storage_errors(str(self.folder.lora)):
                self.model.write_lora(self.folder.lora, EMA)

    def _watch(self, experience: Experience) -> dict[str, str]:
        """What is alarming about the watched rewards, once a rollout has been trained on."""
        figures = {**reward_metrics(experience.table), **experience.watched}
        means = {key.partition("/")[2]: mean for key, mean in figures.items()}
        alarms = {name: watch.observe(means) for name, watch in self._watches.items()}
        return {name: alarm for name, alarm in alarms.items() if alarm is not None}

    def _sound(self, alarms: dict[str, str]) -> None:
        for name, alarm in alarms.items():
            if self.config.watched_rewards[name].action == "stop":
                raise RewardExploited(
                    f"after step {self.step}: {alarm}. Everything is saved: look at {self.folder.samples}, then take "
                    "an earlier checkpoint, or go on with --resume (watch.action: warn only warns)"
                )
            self._say(f"warning after step {self.step}: {alarm}")

    def _scoring_metrics(self) -> Metrics:
        counts = self._inputs.scorer.counts()
        since = {name: now.since(self._counts[name]) for name, now in counts.items()}
        self._counts = counts
        return scoring_metrics(summed_counts(self.world.gather(since)))

    def _times(self) -> Metrics:
        """Of this process, and where there are others, what it waited for them."""
        waited, self._waited = self.world.waited - self._waited, self.world.waited
        return self._display.take_times() | ({} if self.world.size == 1 else {"time/waiting": waited})

    def _log(self, step: int, metrics: Metrics) -> None:
        """Adds what the step took to what it found, and tells of both."""
        metrics |= self._scoring_metrics()
        metrics |= self._times()
        metrics["memory/peak_mb"] = self.world.largest(peak_bytes(self._device)) / 2**20
        self._trackers.log(step, metrics)  # first, so that they know of every step that the file tells of
        if self._metrics_file is not None:
            self._metrics_file.append(step, metrics)
        self._display.step_done(self.step, metrics)

    def _evaluate_if_due(self) -> Metrics:
        every = self.config.trainer.eval_every
        if every is None or self.step % every:
            return {}
        c = self.config
        with self._display.stage("evaluate"), self.policy.acting_as(EMA):
            result = evaluate(
                self.model,
                self.prompt_cache,
                self._inputs.scorer,
                self._inputs.heldout,
                c.evaluation,
                c.rollout,
                world=self.world,
            )
        return {f"eval/{name}": mean for name, mean in result.means.items()}

    def _draw_images(self, rollout: Rollout) -> None:
        every, updates = self.config.logging.images_every, self.config.rollout.updates
        first = self.step - self.step % updates
        if every is not None and any(step % every == 0 for step in range(first, first + updates)):
            grid = self.folder.samples / f"step-{first}.png"
            with self.world.agreed():
                draw_grid(rollout, self.world, grid)
            self._trackers.image(first, grid)

    def _memory_errors(self, stage: Callable[[], str]) -> AbstractContextManager[None]:
        """Where a process is in the middle of a pass that all make together, only its death tells the others."""
        return nullcontext() if self.world.lockstep else memory_errors(stage)

    def _say(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)
