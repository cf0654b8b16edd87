"""The gradients of one update by the trainer's own stage, for tests that have no trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from marble_rl.distributed.world import World
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel
from marble_rl.models.lora import LoraPolicy
from marble_rl.training.batch import TrainingBatch
from marble_rl.training.policy_gradients import GradientStage, PolicyGradients


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
