"""Evaluations during training (`trainer.eval_every`): what they cost, and the best checkpoint so far (best.py).

They draw no training randomness, so a run with them has the same weights as one without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from marble_rl.config import RunConfig
from marble_rl.distributed.world import World
from marble_rl.errors import count_of
from marble_rl.evaluation.evaluate import Evaluation, evaluate, evaluated_prompts
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import EMA, LoraPolicy, Role
from marble_rl.runs.inputs import RunInputs
from marble_rl.runs.log import EVALUATE, Display
from marble_rl.training.best import Best, per_prompt, validation_digest
from marble_rl.types import Metrics


class Evaluations:
    """Evaluates the EMA weights every so many steps: on the validation prompts if there are any, else on the held-out
    ones. Only on validation prompts is a best checkpoint chosen."""

    def __init__(
        self,
        config: RunConfig,
        inputs: RunInputs,
        model: DiffusionModel,
        policy: LoraPolicy,
        cache: PromptCache,
        world: World,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._model = model
        self._policy = policy
        self._cache = cache
        self._world = world
        self._say = say
        self._every = config.trainer.eval_every
        self._prompts = inputs.validation or inputs.heldout
        asked = evaluated_prompts(self._prompts, config.evaluation)
        self._images = len(asked) * config.evaluation.images_per_prompt
        chooses = self._every is not None and inputs.validation is not None
        self._best = Best(validation_digest(config, asked)) if chooses else None
        """None where no checkpoint is chosen"""
        self._began: tuple[float, int] | None = None
        """When this process began to train, and after which step; None once the cost was reported"""

    def announce(self, step: int) -> None:
        """Before the first step of this process: what is ahead."""
        steps = self._config.trainer.steps
        if self._every is None:
            if self._inputs.validation is not None:
                self._say("prompts.validation is given, but trainer.eval_every is null: no best checkpoint is chosen")
            return
        left = steps // self._every - step // self._every
        which = "validation" if self._inputs.validation else "held-out" if self._apart else "training"
        base = "; the first also scores the base model" if self._best is not None and self._best.base is None else ""
        self._say(
            f"evaluations during training: {left}, one every {count_of(self._every, 'step')}, "
            f"{count_of(self._images, 'image')} of {which} prompts each{base}"
        )
        self._began = time.perf_counter(), step

    def if_due(self, step: int, display: Display) -> Metrics:
        """Evaluate the weights after ``step`` updates, if it is their turn."""
        if self._every is None or step % self._every:
            return {}
        with display.stage(EVALUATE):
            before = time.perf_counter()
            if self._best is not None and self._best.base is None:
                self._best.base = per_prompt(self._evaluate("base"))
            middle = time.perf_counter()
            result = self._evaluate(EMA)
            end = time.perf_counter()
        self._report_cost(step, end - middle, busy=before)
        metrics = {f"eval/{name}": mean for name, mean in result.means.items()}
        return {**metrics, "evaluation/images": float(self._images), **self._judge(step, result)}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self._best is None else {"best": self._best.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._best is None or "best" not in state:
            return
        if not self._best.load_state_dict(state["best"]):
            self._say(
                "the validation changed (prompts, rewards or evaluation settings): the best checkpoint is chosen anew"
            )

    @property
    def best_step(self) -> int | None:
        """Of the best checkpoint so far; None where there is none."""
        return None if self._best is None else self._best.step

    @property
    def _apart(self) -> bool:
        return self._inputs.heldout is not self._inputs.train

    def _evaluate(self, role: Role) -> Evaluation:
        c = self._config
        with self._policy.acting_as(role):
            return evaluate(
                self._model, self._cache, self._inputs.scorer, self._prompts, c.evaluation, c.rollout, world=self._world
            )

    def _judge(self, step: int, result: Evaluation) -> Metrics:
        """Compare with the best so far; the same on all ranks, which all have all scores."""
        if self._best is None:
            return {}
        judged = self._best.judge(self._config, result)
        if judged is None:
            self._say(f"after step {step}: the base model scores all validation prompts alike: no score")
            return {}
        is_best = self._best.observe(step, judged)
        verdict = "the best so far" if is_best else f"the best is still that of step {self._best.step}"
        if judged.below:
            verdict = f"not kept: {', '.join(judged.below)} below the floor"
        self._say(f"validation after step {step}: score {judged.score:+.3f} (the base model: 0), {verdict}")
        return {"evaluation/score": judged.score}

    def _report_cost(self, step: int, seconds: float, busy: float) -> None:
        """Once: what an evaluation takes, measured, and its share of the run's time."""
        if self._began is None or self._every is None:
            return
        began, first = self._began
        self._began = None
        between = self._every * (busy - began) / (step - first)
        self._say(
            f"an evaluation takes {seconds:.1f} s for {self._images} images: about "
            f"{100 * seconds / (seconds + between):.0f} % of the run's time with trainer.eval_every: {self._every}"
        )
