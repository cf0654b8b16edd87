"""Guards are measured against the base model: a few images of the model without adapter for each prompt of a rollout,
scored by the guards once and kept in the run's folder.

Noise is seeded by (seed, prompt, image) and a prompt's images are one batch, so the scores are the same whenever and on
whichever rank they are computed. The prompts that have no scores yet are divided over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from marble_rl.config import RunConfig
from marble_rl.distributed.world import World
from marble_rl.errors import InputError, RunStopped
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import LoraPolicy
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rollout.rollout import Sampled, try_sample
from marble_rl.runs.base_scores import BaseScore, BaseScores
from marble_rl.runs.log import Display
from marble_rl.seeding import generator, normal_rows
from marble_rl.storage import storage_errors
from marble_rl.types import Group, Prompt, RewardTable

STAGE = "base_images"
"""Its time is logged as time/base_images."""


@dataclass(frozen=True)
class Reading:
    """What a rollout says about a guard."""

    difference: float
    """Mean of (score - base score of the prompt) over the samples that it applies to"""
    squares: float
    """Sum of squared deviations of the base model's scores from their prompt's mean, over the rollout's prompts"""
    freedom: int
    """Degrees of freedom of ``squares``"""


class BaseImages:
    """Base scores of the prompts seen so far."""

    def __init__(
        self,
        config: RunConfig,
        scorer: Scorer,
        model: DiffusionModel,
        policy: LoraPolicy,
        prompts: PromptCache,
        world: World,
        path: Path,
        say: Callable[[str], None],
    ) -> None:
        """``path``: the record, which rank 0 reads and writes."""
        self._config = config
        self._guards = tuple(config.guards)
        self._images = max((guard.base_images for guard in config.guards.values()), default=0)
        self._scorer, self._model, self._policy, self._prompts = scorer, model, policy, prompts
        self._world = world
        self._path = path
        rollout = config.rollout
        self._made_with = {
            "seed": config.trainer.seed,
            "images": self._images,
            **rollout.model_dump(include={"steps", "solver", "height", "width", "frames"}),
        }
        stored = self._stored(say) if self._guards and world.first else {}
        self._known: dict[int, dict[str, BaseScore]] = world.broadcast(stored)

    def _stored(self, say: Callable[[str], None]) -> dict[int, dict[str, BaseScore]]:
        """What the record holds; nothing if it is damaged or of other settings."""
        if not self._path.exists():
            return {}
        try:
            record = BaseScores.read(self._path)
        except InputError as error:
            say(str(error))
            return {}
        return record.prompts if record.made_with == self._made_with else {}

    def read(self, table: RewardTable, drawn: Sequence[Group], display: Display) -> dict[str, Reading]:
        """What the scores of a rollout, of all ranks, say about each guard; none if it has no scores in it."""
        self._complete([group.prompt for group in drawn], display)
        readings = {name: self._reading(name, table, drawn) for name in self._guards}
        return {name: reading for name, reading in readings.items() if reading is not None}

    def _reading(self, name: str, table: RewardTable, drawn: Sequence[Group]) -> Reading | None:
        scores = table.columns([name])
        size = len(scores.values) // len(drawn)
        bases = [self._known.get(group.prompt.index, {}).get(name) for group in drawn]
        means = torch.tensor([torch.nan if base is None else base.mean for base in bases], dtype=torch.float64)
        difference = scores.values[:, 0] - means.repeat_interleave(size)
        known = difference[scores.applicable[:, 0] & ~difference.isnan()]
        if not len(known):
            return None
        there = [base for base in bases if base is not None]
        freedom = sum(base.images - 1 for base in there)
        return Reading(float(known.mean()), sum(base.squares for base in there), freedom)

    def _complete(self, prompts: Sequence[Prompt], display: Display) -> None:
        """Sample and score the prompts that have no base scores yet, and write the record."""
        by_index = {prompt.index: prompt for prompt in prompts if self._is_missing(prompt)}
        if not by_index:
            return
        with display.stage(STAGE):
            parts = self._world.gather(self._scored(list(by_index.values()), display))
            scored = {index: score for part in parts for index, score in part.items()}
            self._known |= {index: scored[index] for index in by_index}  # the same file, however many ranks
            with self._world.failing_together():
                if self._world.first:
                    with storage_errors(str(self._path)):
                        BaseScores(made_with=self._made_with, prompts=self._known).write(self._path)

    def _is_missing(self, prompt: Prompt) -> bool:
        applies = any(self._scorer[name].applies_to(prompt) for name in self._guards)
        return applies and prompt.index not in self._known

    def _scored(self, missing: Sequence[Prompt], display: Display) -> dict[int, dict[str, BaseScore]]:
        """This rank's share of the prompts."""
        own = [missing[i] for i in self._world.share(len(missing))]
        failure = self._world.deferring(RunStopped)
        rows = [prompt for prompt in own for _ in range(self._images)]
        with self._policy.acting_as("base"), self._scorer.in_background(self._guards, rows) as scoring:
            for done, prompt in enumerate(own, start=1):
                parts = self._sampled(prompt)
                if failure.held is None:
                    with failure:
                        for part in parts:
                            part.raise_failure()
                        scoring.add(torch.cat([part.images for part in parts]))
                display.count(done, len(own))
            if self._world.lockstep and len(own) < len(missing) / self._world.size:
                self._sampled(missing[0])  # other ranks have one prompt more: make as many passes as they do
            failure.raise_held()
            table = scoring.finish()
        return {prompt.index: self._of(table, i) for i, prompt in enumerate(own)}

    def _sampled(self, prompt: Prompt) -> list[Sampled]:
        rollout = self._config.rollout
        shape = self._model.latent_shape(rollout.height, rollout.width, rollout.frames)
        sigmas = self._model.sigmas(rollout.steps, shape)
        seed = self._config.trainer.seed
        noise = normal_rows((generator(seed, "base", prompt.index, j) for j in range(self._images)), shape)
        row = self._prompts.encode([prompt.text])
        return [
            try_sample(self._model, part, row.repeat(len(part)), sigmas, rollout.solver)
            for part in noise.split(rollout.images_at_once)
        ]

    def _of(self, table: RewardTable, place: int) -> dict[str, BaseScore]:
        rows = table.rows(range(place * self._images, (place + 1) * self._images))
        scores = {
            name: rows.values[rows.applicable[:, column], column].tolist() for column, name in enumerate(rows.names)
        }
        return {name: BaseScore.of(values) for name, values in scores.items() if values}
