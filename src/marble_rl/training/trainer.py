"""The training loop. It reads like the list of the stages:

prompts -> rollout -> rewards -> advantages     experience.py
gradients -> coefficients -> update             learner.py
log, checkpoint                                 runs/journal.py, runs/checkpoint.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from marble_rl.config import RunConfig
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.distributed.world import World, check_same_rewards, check_same_weights, check_world, join
from marble_rl.errors import MarbleError, NonFiniteGradient, RankLost, RewardExploited, RunStopped, StorageFailed
from marble_rl.evaluation.evaluate import evaluate
from marble_rl.memory.out_of_memory import memory_errors
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import EMA, LoraPolicy
from marble_rl.runs.checkpoint import load_newest, restoring, save_checkpoint
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.inputs import check_inputs
from marble_rl.runs.journal import Journal, tracker_settings
from marble_rl.runs.plan import cost, plan, prompt_remarks
from marble_rl.runs.trackers import check_trackers
from marble_rl.storage import storage_errors
from marble_rl.training.base_images import BaseImages
from marble_rl.training.batch import training_batch
from marble_rl.training.constants import ConstantRewards
from marble_rl.training.experience import Experience, ExperienceSource
from marble_rl.training.floors import Floors
from marble_rl.training.learner import Learner
from marble_rl.training.metrics import clip_metrics, reward_metrics
from marble_rl.training.sharding import check_sharding, load_base, parameter_counts
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
    _prompt_cache: PromptCache
    _source: ExperienceSource
    _learner: Learner
    _watches: Watches
    _constants: ConstantRewards
    _floors: Floors
    _journal: Journal
    _experience: Experience | None = None
    """The rollout that the next update trains on; None: sample a new one."""

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
        with self.world.failing_together():
            self._inputs = check_inputs(config)
            check_world(self.world, config.rollout.groups, config.rollout.updates)
            check_sharding(config, self.world)
            self._device = self.world.pick_device(config.model.device)
            self._inputs.scorer.check_devices()
            check_trackers(tracker_settings(config, self.world))
            self._remarks = self.folder.check_start(config, resume) if self.world.first else []

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return self._learner.step

    def train(self) -> RunResult:
        """Run to the last step; raises RunStopped or Interrupted after saving the last complete step, if it can be
        saved."""
        steps = self.config.trainer.steps
        metrics: Metrics = {}
        interrupts = Interrupts(self._say, agree=self.world.largest, launched=self.world.size > 1)
        with self.folder.opened(self.config, self.world), interrupts:
            with self.world.failing_together(), memory_errors(lambda: "loading", self.world.lockstep):
                self._load()
            if interrupts.pending():
                interrupts.stop("stopped before the first step; continue with --resume")
            with self._journal:
                while self.step < steps:
                    try:
                        with self.world.failing_together(), memory_errors(self._stage, self.world.lockstep):
                            metrics = self._take_step()
                        finished, stopping = self.step == steps, interrupts.pending()
                        if finished or stopping or self.step % self.config.trainer.save_every == 0:
                            self._save()
                    except RunStopped as stop:
                        self._save_before_stopping(stop)
                        raise
                    if stopping and not finished:
                        interrupts.stop(f"stopped after step {self.step}; continue with --resume")
            with self.world.failing_together():
                self._write_lora()
        return RunResult(self.folder.path, self.step, self.folder.lora, metrics)

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
        index, update = divmod(step, c.rollout.updates)
        if self._experience is None:
            self._experience = self._source.gather(index + learner.skips.total, step, display)
            self._journal.save_images(self._experience.rollout, step)
        experience, rollout = self._experience, self._experience.rollout

        batch = training_batch(rollout, update, learner.loss, seed=c.trainer.seed, step=step)
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
        last_of_rollout = update + 1 == c.rollout.updates
        with display.stage("update"):
            metrics |= learner.apply(proposal, last_of_rollout)
        alarms: dict[str, str] = {}
        if last_of_rollout:
            self._experience = None
            alarms = self._watches.observe(experience.means)
            metrics |= experience.watched | self._watches.figures(alarms)
            below = self._floors.commit(levels, metrics)
            for message in (*([] if below is None else [below]), *self._constants.observe(experience.scored)):
                self._say(f"warning after step {self.step}: {message}")
        try:
            with self.world.failing_together(), memory_errors(lambda: "evaluate", self.world.lockstep):
                metrics |= self._evaluate_if_due()
        except MarbleError:  # raised on every rank; the update is done, so log it without the evaluation
            self._journal.log(step, metrics)
            raise
        self._journal.log(step, metrics)
        self._act_on(alarms)
        return metrics

    def _evaluate_if_due(self) -> Metrics:
        every = self.config.trainer.eval_every
        if every is None or self.step % every:
            return {}
        c = self.config
        with self._journal.display.stage("evaluate"), self._learner.policy.acting_as(EMA):
            result = evaluate(
                self._model,
                self._prompt_cache,
                self._inputs.scorer,
                self._inputs.heldout,
                c.evaluation,
                c.rollout,
                world=self.world,
            )
        return {f"eval/{name}": mean for name, mean in result.means.items()}

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
        c, scorer = self.config, self._inputs.scorer
        planned = plan(c, self._inputs, self.folder.path.parent) if self.world.first else None
        about_prompts = [] if planned is None else prompt_remarks(planned, c, self._inputs)
        for remark in (*self._remarks, *self._inputs.remarks, *about_prompts):
            self._say(remark)
        # Rank 0 reads the checkpoint and broadcasts it, so that all ranks start from the same one.
        newest = load_newest(self.folder.checkpoints, self._say) if self.world.first else None
        checkpoint = self.world.broadcast(newest)
        if checkpoint:
            self._say(f"continuing after step {checkpoint.step}")
        with self.console.status("loading models"):
            self._model = load_base(c, self._device, self.world)
            self._model.check_trainable()
            policy = LoraPolicy(self._model.transformer, c.lora, self._model.lora_targets, c.trainer.seed)
            loaded = scorer.load(self._device)
            check_same_rewards(self.world, scorer.names)
            # Checked again: before loading, a remote reward or a model on the hub could not be queried.
            scorer.check_media(self._model.media())
            scorer.check_applicability(c.trained_rewards, self._inputs.train.prompts)
        if self.world.lockstep:
            own, whole = parameter_counts(self._model.transformer)
            loaded.append(f"base model sharded: {own:,} of {whole:,} parameters on this rank")
        for line in (*loaded, *([] if planned is None else cost(planned))):
            self._say(line)
        self._prompt_cache = PromptCache(self._model)
        base = BaseImages(
            c, scorer, self._model, policy, self._prompt_cache, self.world, self.folder.base_scores, self._say
        )
        self._source = ExperienceSource(c, self._inputs, self._model, policy, self._prompt_cache, self.world, base)
        self._learner = Learner(c, self._model, policy, self.world, self.folder.path, self._say)
        self._watches = Watches(c)
        self._constants = ConstantRewards(c.trained_rewards)
        self._floors = Floors(c.guards)
        if checkpoint:
            with restoring(checkpoint, self.folder.path):
                self._learner.restore(checkpoint)
                self._watches.load_state_dict(checkpoint.state.get("watches", {}))
                self._constants.load_state_dict(checkpoint.state.get("constants", {}))
                if c.guards:
                    self._floors.load_state_dict(checkpoint.state["floors"])
        self._journal = Journal(c, self.folder, self.world, scorer, self._device, self.console, self.step)

    def _save(self) -> None:
        """Rank 0 writes the checkpoint; the other ranks wait for it."""
        with self.world.failing_together(), self._journal.display.stage("checkpoint"):
            check_same_weights(self.world, self._learner.policy.flat)
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        if self.world.first and self._learner.updater.intact:
            floors = {"floors": self._floors.state_dict()} if self.config.guards else {}
            constants = self._constants.state_dict()
            state = self._learner.checkpoint(watches=self._watches.state_dict(), constants=constants, **floors)
            save_checkpoint(self.folder.checkpoints, state, self.config.trainer.keep_checkpoints)

    def _save_before_stopping(self, stop: RunStopped) -> None:
        """Save the weights after the last complete step. Where the disk refuses a write, or an update was interrupted
        half-way, the previous checkpoint stays the newest."""
        if isinstance(stop, RankLost):
            self._write_checkpoint()
        elif not isinstance(stop, StorageFailed):
            with self.world.failing_together():
                self._write_checkpoint()

    def _write_lora(self) -> None:
        if self.world.first:
            with storage_errors(str(self.folder.lora)):
                self._model.write_lora(self.folder.lora, EMA)

    def _stage(self) -> str:
        """Name of the stage that is running, for error messages."""
        return self._journal.display.current_stage

    def _say(self, message: str) -> None:
        self.console.print(message, markup=False, soft_wrap=True)
