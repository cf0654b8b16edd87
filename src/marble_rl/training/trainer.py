"""The training loop. It reads like the list of the stages:

prompts -> rollout -> rewards -> advantages     experience.py
gradients -> coefficients -> update             learner.py
log, checkpoint                                 runs/journal.py, runs/checkpoint.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from marble_rl.config import RunConfig
from marble_rl.devices import deterministic_kernels
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.distributed.world import World, check_same_rewards, check_same_weights, check_world, join
from marble_rl.errors import (
    MarbleError,
    NonFiniteGradient,
    RewardExploited,
    RewardsAbandoned,
    RunStopped,
    StorageFailed,
)
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import EMA, LoraPolicy
from marble_rl.runs.checkpoint import Checkpoint, restoring, save_checkpoint
from marble_rl.runs.folder import RunFolder, StartMode
from marble_rl.runs.history import add_start
from marble_rl.runs.inputs import check_inputs
from marble_rl.runs.journal import Journal, tracker_settings
from marble_rl.runs.plan import Plan, cost, plan, prompt_remarks
from marble_rl.runs.resuming import how_to_continue, resume_point
from marble_rl.runs.run_log import LOG, logging_to
from marble_rl.runs.trackers import check_trackers
from marble_rl.storage import storage_errors
from marble_rl.training.base_images import BaseImages
from marble_rl.training.constants import ConstantRewards
from marble_rl.training.evaluations import Evaluations
from marble_rl.training.experience import Experience, ExperienceSource
from marble_rl.training.failures import blaming_plugins, explained
from marble_rl.training.floors import Floors
from marble_rl.training.learner import Learner
from marble_rl.training.metrics import clip_metrics, reward_metrics
from marble_rl.training.sharding import check_sharding, load_base, parameter_counts
from marble_rl.training.summary import introduction
from marble_rl.training.watch import Watches
from marble_rl.types import Metrics


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run."""

    out: Path
    steps: int
    lora: Path
    """Folder that plain diffusers' ``load_lora_weights`` reads: the EMA weights."""
    metrics: Metrics
    """Metrics of the last step; empty if all steps were done before this call."""


class Trainer:
    """Trains one run. Creating it checks the config as far as that is possible before a model is loaded."""

    # Set by _load, once the config has been checked.
    _model: DiffusionModel
    _source: ExperienceSource
    _learner: Learner
    _watches: Watches
    _constants: ConstantRewards
    _floors: Floors
    _evaluations: Evaluations
    _journal: Journal
    _experience: Experience | None = None
    """The rollout that the next update trains on; None: sample a new one."""

    def __init__(
        self,
        config: RunConfig,
        out: Path | None = None,
        *,
        mode: StartMode = "new",
        console: Console | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.folder = RunFolder(out or Path("runs") / f"{config.balance.type}-seed{config.trainer.seed}")
        self.world = world or join()
        self.console = console or Console(stderr=True)
        if not self.world.first:
            self.console = Console(quiet=True)
        with self.world.failing_together():
            self._inputs = check_inputs(config)
            check_world(self.world, config.rollout.groups, config.rollout.updates)
            check_sharding(config, self.world)
            self._inputs.scorer.check_devices(self.world.size)
            self._device = self.world.pick_device(config.model.device)
            self.world.check_exchange(self._device)
            check_trackers(tracker_settings(config, self.world))
            self._changes = self.folder.check_start(config, mode) if self.world.first else []
        self._interrupts = Interrupts(
            self._say, "finishing to load, then stopping", agree=self.world.largest, launched=self.world.size > 1
        )

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return self._learner.step

    def train(self) -> RunResult:
        """Run to the last step; raises RunStopped or Interrupted after saving the last complete step, if it can be
        saved."""
        with (
            self.folder.opened(self.config, self.world),
            logging_to(self.folder.root, self.world, self.console),
            self._interrupts,
            deterministic_kernels(self.config.trainer.deterministic),
            blaming_plugins(self.config),
        ):
            try:
                with self.world.failing_together(), explained(self.config, lambda: "loading", self.world.lockstep):
                    self._load()
                if self._interrupts.pending():
                    self._stop("stopped before the first step")
                with self._journal:
                    metrics = self._run_steps()
                with self.world.failing_together():
                    self._write_lora()
            except KeyboardInterrupt:  # a second signal, while there was no step to save
                self._stop("stopped at once")
        return RunResult(self.folder.path, self.step, self.folder.lora, metrics)

    def _run_steps(self) -> Metrics:
        """The steps that are left, with checkpoints between them; returns the metrics of the last one."""
        steps, metrics = self.config.trainer.steps, Metrics()
        self._interrupts.doing = "finishing this step, then saving"
        while self.step < steps:
            with self._saving_before_stopping():
                with self.world.failing_together(), explained(self.config, self._stage, self.world.lockstep):
                    metrics = self._take_step()
                finished, stopping = self.step == steps, self._interrupts.pending()
                due = self.step % self.config.trainer.save_every == 0
                if finished or stopping or due or self.step == self._evaluations.best_step:
                    self._save()
            if stopping and not finished:
                self._stop(f"stopped after step {self.step}")
        return metrics

    def _take_step(self) -> Metrics:
        """One optimizer update. If its gradient is not finite and may be skipped, try again with the next rollout."""
        while True:
            try:
                return self._try_step()
            except NonFiniteGradient as bad:
                self._learner.skips.skip(bad)
                self._say(f"skipped: {bad}")
            # Outside the except block: inside it, the traceback would keep the rollout and its gradients in memory.
            self._experience = None

    def _try_step(self) -> Metrics:
        """One optimizer update. Raises NonFiniteGradient before weights, optimizer or balancing rule have changed."""
        step, c, learner, display = self.step, self.config, self._learner, self._journal.display
        index, since_rollout = divmod(step, c.rollout.steps_each)
        update = since_rollout % c.rollout.updates
        if self._experience is None:
            self._experience = self._source.gather(index + learner.skips.total, step, display)
            self._journal.save_images(self._experience.rollout, step)
        experience, rollout = self._experience, self._experience.rollout

        batch = learner.batch(rollout, update)
        levels = self._floors.after(experience.readings)
        proposal = learner.propose(batch, experience.scored, rollout.table_rows(update), display, levels.rates)

        rows = rollout.table_rows(update, all_ranks=True)
        metrics = {
            **reward_metrics(experience.unclipped.rows(rows)),
            **clip_metrics(experience.unclipped.rows(rows), experience.scored.table.rows(rows)),
            **proposal.figures,
            **levels.figures,
            "guard/clamped": float(experience.clamped[rows].sum()),
        }
        last_of_rollout = since_rollout + 1 == c.rollout.steps_each
        alarms: dict[str, str] = {}
        with self._interrupts.shielded():
            with display.stage("update"):
                metrics |= learner.apply(proposal, last_of_rollout)
            if last_of_rollout:
                self._experience = None
                alarms = self._watches.observe(experience.means)
                metrics |= experience.watched | self._watches.figures(alarms)
                below = self._floors.commit(levels, metrics)
                for message in (*([] if below is None else [below]), *self._constants.observe(experience.scored)):
                    self._say(f"warning after step {self.step}: {message}")
        try:
            self._interrupts.raise_deferred()
            with self.world.failing_together(), explained(c, lambda: "evaluate", self.world.lockstep):
                metrics |= self._evaluations.if_due(self.step, display)
        except (MarbleError, KeyboardInterrupt):  # the update is done, so log it without the evaluation
            self._journal.log(step, metrics)
            raise
        self._journal.log(step, metrics)
        self._act_on(alarms)
        return metrics

    def _act_on(self, alarms: dict[str, str]) -> None:
        """Warn, or stop the run, where a watched reward fell while the trained ones rose."""
        for name, alarm in alarms.items():
            if self.config.watched_rewards[name].action == "stop":
                raise RewardExploited(
                    f"after step {self.step}: {alarm}. Everything is saved: look at {self.folder.samples}, then take "
                    "an earlier checkpoint, or go on with --resume (watch.action: warn only warns)"
                )
            self._say(f"warning after step {self.step}: {alarm}")

    # Around the loop

    def _load(self) -> None:
        """Load models, and the newest checkpoint where there is one."""
        planned = plan(self.config, self._inputs, self.folder.root.parent) if self.world.first else None
        self._remark_on_inputs(planned)
        # Rank 0 reads the checkpoint and broadcasts it, so that all ranks start from the same one.
        newest = resume_point(self.folder.checkpoints, self._say) if self.world.first else None
        checkpoint = self.world.broadcast(newest)
        if checkpoint:
            self._say(f"continuing after step {checkpoint.step}")
        self._write_history(0 if checkpoint is None else checkpoint.step)
        with self.console.status("loading models"):
            policy, remarks = self._load_models()
        own, parameters = parameter_counts(self._model.transformer)
        if self.world.lockstep:
            remarks.append(f"base model sharded: {own:,} of {parameters:,} parameters on this rank")
        self._build_stages(policy)
        if checkpoint:
            self._restore(checkpoint)
        about = introduction(self.config, self.folder.path, self._device, policy.flat.numel(), parameters)
        for line in (*remarks, *([] if planned is None else cost(planned)), *about):
            self._say(line)
        self._evaluations.announce(self.step)
        scorer = self._inputs.scorer
        self._journal = Journal(self.config, self.folder, self.world, scorer, self._device, self.console, self.step)

    def _write_history(self, step: int) -> None:
        """Before the models are loaded, because config.json has the new settings already."""
        if self.world.first:
            with storage_errors(str(self.folder.history)):
                add_start(self.folder.history, step, self.world.size, str(self._device), self._changes)

    def _remark_on_inputs(self, planned: Plan | None) -> None:
        for change in self._changes:
            if not change.free:
                self._say(f"{change}: from here on the run differs from the one that was started")
        about_prompts = [] if planned is None else prompt_remarks(planned, self.config, self._inputs)
        for remark in (*self._inputs.remarks, *about_prompts):
            self._say(remark)

    def _load_models(self) -> tuple[LoraPolicy, list[str]]:
        """Load the base model, its adapters and the rewards; with remarks on optional rewards that are left out."""
        c, scorer = self.config, self._inputs.scorer
        self._model = load_base(c, self._device, self.world)
        self._model.check_trainable()
        policy = LoraPolicy(self._model.transformer, c.lora, self._model.lora_targets, c.trainer.seed)
        remarks = scorer.load(self._device)
        check_same_rewards(self.world, scorer.names)
        # Checked again: before loading, a remote reward or a model on the hub could not be queried.
        scorer.check_media(self._model.media())
        self._inputs.check_applicability(c.trained_rewards)
        return policy, remarks

    def _build_stages(self, policy: LoraPolicy) -> None:
        c, model, cache = self.config, self._model, PromptCache(self._model)
        scores = self.folder.base_scores
        base = BaseImages(c, self._inputs.scorer, model, policy, cache, self.world, scores, self._say)
        self._source = ExperienceSource(c, self._inputs, model, policy, cache, self.world, base)
        self._learner = Learner(c, model, policy, self.world, self.folder.root, self._say)
        self._watches = Watches(c)
        self._constants = ConstantRewards(c.trained_rewards)
        self._floors = Floors(c.guards)
        self._evaluations = Evaluations(c, self._inputs, model, policy, cache, self.world, self._say)

    def _restore(self, checkpoint: Checkpoint) -> None:
        with restoring(checkpoint, self.folder.path):
            self._learner.restore(checkpoint)
            self._watches.load_state_dict(checkpoint.state.get("watches", {}))
            self._constants.load_state_dict(checkpoint.state.get("constants", {}))
            self._evaluations.load_state_dict(checkpoint.state)
            if self.config.guards:
                self._floors.load_state_dict(checkpoint.state["floors"])

    def _save(self) -> None:
        """Rank 0 writes the checkpoint; the other ranks wait for it."""
        with self.world.failing_together(), self._journal.display.stage("checkpoint"):
            check_same_weights(self.world, self._learner.policy.flat)
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        if self.world.first and self._learner.updater.intact:
            floors = {"floors": self._floors.state_dict()} if self.config.guards else {}
            state = self._learner.checkpoint(
                watches=self._watches.state_dict(),
                constants=self._constants.state_dict(),
                **floors,
                **self._evaluations.state_dict(),
            )
            keep, best = self.config.trainer.keep_checkpoints, self._evaluations.best_step
            save_checkpoint(self.folder.checkpoints, state, keep, best)

    @contextmanager
    def _saving_before_stopping(self) -> Iterator[None]:
        """If the block cannot go on, save the weights after the last complete step. Where the disk refuses a write, or
        an update was interrupted half-way, the previous checkpoint stays the newest."""
        try:
            yield
        except RunStopped as stop:
            if self.world.broken is not None:
                self._write_checkpoint()  # alone: the other ranks cannot be asked any more
            elif not isinstance(stop, StorageFailed):
                with self.world.failing_together():
                    self._write_checkpoint()
            stop.hint = self._how_to_continue()
            if isinstance(stop, RewardsAbandoned):
                self._interrupts.pending()  # a rank that got no signal learns it from the others
                self._stop(f"stopped after step {self.step}: {stop}")
            raise
        except KeyboardInterrupt:  # a second signal
            self._write_checkpoint()
            self._stop(f"stopped at once, after step {self.step}")

    def _how_to_continue(self) -> str:
        return how_to_continue(self.folder.path, self.folder.checkpoints, self.world.size)

    def _stop(self, message: str) -> NoReturn:
        self._interrupts.stop(message, self._how_to_continue())

    def _write_lora(self) -> None:
        if self.world.first:
            with storage_errors(str(self.folder.lora)):
                self._model.write_lora(self.folder.lora, EMA)

    def _stage(self) -> str:
        """Name of the stage that is running, for error messages."""
        return self._journal.display.current_stage

    def _say(self, message: str) -> None:
        LOG.info(message)
