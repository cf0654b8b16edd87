"""The parts of a training step on the tiny pipeline, put together without a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from marble_rl.config import RunConfig, load_config
from marble_rl.distributed.world import World
from marble_rl.models import load_model
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import LoraPolicy
from marble_rl.runs.inputs import check_inputs
from marble_rl.runs.log import Display
from marble_rl.training.batch import training_batch
from marble_rl.training.experience import Experience, ExperienceSource
from marble_rl.training.learner import Learner, Proposal
from runs import base_config

CPU = torch.device("cpu")


@dataclass
class Parts:
    config: RunConfig
    model: DiffusionModel
    policy: LoraPolicy
    source: ExperienceSource
    learner: Learner
    display: Display
    said: list[str]

    def gather(self, index: int = 0) -> Experience:
        return self.source.gather(index, self.learner.step, self.display)

    def propose(self, experience: Experience, update: int = 0) -> Proposal:
        rollout, learner = experience.rollout, self.learner
        batch = training_batch(rollout, update, learner.loss, seed=self.config.trainer.seed, step=learner.step)
        return learner.propose(batch, experience.scored, rollout.table_rows(update), self.display)


def parts(model_folder: Path, folder: Path, world: World | None = None, **changes: Any) -> Parts:
    """From the base config of the tests, with whole sections replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**base_config(model_folder), **changes}))
    config = load_config(path)
    world = world or World()
    model = load_model(config.model.path, CPU, config.model.text_length)
    policy = LoraPolicy(model.transformer, config.lora, model.lora_targets, config.trainer.seed)
    inputs = check_inputs(config)
    inputs.scorer.load(CPU)
    said: list[str] = []
    source = ExperienceSource(config, inputs, model, policy, PromptCache(model), world)
    learner = Learner(config, model, policy, world, folder, said.append)
    display = Display(Console(quiet=True), config.trainer.steps, 0, config.trained_rewards, 1)
    return Parts(config, model, policy, source, learner, display, said)
