"""The gradients of one update by the trainer's own stage, for tests that have no trainer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marble_rl.distributed.world import World
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models import load_model
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.precision import MemorySettings
from marble_rl.prompts import load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rollout.rollout import roll_out
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.training.batch import TrainingBatch, training_batch
from marble_rl.training.policy_gradients import GradientStage, PolicyGradients
from marble_rl.types import Rollout


def policy_gradients(
    model: DiffusionModel,
    policy: LoraPolicy,
    batch: TrainingBatch,
    columns: Tensor,
    settings: NftSettings,
    *,
    per_column: bool,
    micro_batch: int | MicroBatch,
    scale: float | None = None,
    world: World | None = None,
    **options: Any,
) -> PolicyGradients:
    """One gradient for each column of advantages [N, J], or the gradient of an ordinary step for the only column."""
    stage = GradientStage(model, policy, Nft(settings), micro_batch, world=world)
    if scale is not None:
        stage.scale.value = scale
    if per_column:
        return stage.per_reward(batch, columns, **options)
    assert columns.shape[1] == 1, "a single backward pass takes a single advantage"
    return stage.combined(batch, columns[:, 0], **options)


CPU = torch.device("cpu")


def trained_on(folder: Path, memory: MemorySettings, scale: float = 1.0) -> tuple[Any, Rollout, LoraPolicy, Any]:
    """A model with three different adapters, a rollout of it, and the function that gives its gradients."""
    import families  # which imports this module

    model: Any = load_model(str(folder), CPU, 16, memory=memory)
    policy = families.adapted(model)
    prompts = load_prompts([PromptSourceConfig(name="a", texts=[*families.PROMPTS, "a kite", "an ox"])], "prompts")
    frames = {"frames": 5} if model.makes_videos else {}
    config = RolloutConfig(groups=4, group_size=2, steps=3, height=16, width=32, **frames)
    rollout = roll_out(model, policy, PromptCache(model), prompts.draw(0, 0, 4), config, seed=0, index=0)
    loss = Nft(NftSettings(timesteps_per_sample=1))
    batch = training_batch(rollout, 0, loss, seed=5, step=9, expert_of=model.experts)
    columns = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))

    def gradients(method: Any = "fused", x0: Tensor | None = None) -> PolicyGradients:
        given = batch if x0 is None else dataclasses.replace(batch, x0=x0)
        settings = {"per_column": True, "micro_batch": 3, "method": method, "verify": method == "fused"}
        return policy_gradients(model, policy, given, columns, NftSettings(kl_weight=0.1), **settings, scale=scale)

    return model, rollout, policy, gradients
