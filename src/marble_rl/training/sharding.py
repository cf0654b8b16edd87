"""FSDP2 for the frozen base model: each rank keeps a shard, and a layer is gathered only while it is used.

Adapters are attached afterwards, so they are not sharded: they are small, flat (models/lora.py), and their gradients
are exchanged once a step, not once a layer.

Gathering a layer is a collective. All ranks must therefore make the same forward and backward passes in the same
order: `World.lockstep`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from marble_rl.config import RunConfig
from marble_rl.distributed.world import World
from marble_rl.errors import InputError, count_of
from marble_rl.models import load_model
from marble_rl.models.base import DiffusionModel
from marble_rl.models.experts import parts_of
from marble_rl.models.precision import memory_settings


def check_sharding(config: RunConfig, world: World) -> None:
    """Raise InputError if the base model cannot be sharded, or if ranks would make different passes."""
    if not config.trainer.shard_base:
        return
    if world.size == 1:
        raise InputError(
            "trainer.shard_base: true, but there is one rank, so nothing to shard; start several with torchrun"
        )
    if config.model.quantize is not None:
        raise InputError(
            f"trainer.shard_base: model.quantize: {config.model.quantize} cannot be sharded; remove one of the two"
        )
    rollout, micro_batch = config.rollout, config.trainer.micro_batch
    each = rollout.groups // rollout.updates
    if each % world.size:
        raise InputError(
            f"trainer.shard_base: needs equal shares, but rollout.groups: {rollout.groups} in rollout.updates: "
            f"{rollout.updates} are {count_of(each, 'group')} an update for {world.size} ranks; use a multiple of "
            f"{world.size}"
        )
    if micro_batch == "auto":
        raise InputError("trainer.shard_base: needs equal micro-batches; set trainer.micro_batch to a number")
    if rollout.group_size % micro_batch:
        raise InputError(
            f"trainer.shard_base: needs equal micro-batches, but trainer.micro_batch: {micro_batch} does not divide "
            f"rollout.group_size: {rollout.group_size}"
        )
    every = config.loss.regularize_every
    if rollout.group_size % (every * micro_batch):
        raise InputError(
            f"trainer.shard_base: needs equal micro-batches, but of rollout.group_size: {rollout.group_size} samples "
            f"one in loss.regularize_every: {every} is regularised, in micro-batches of trainer.micro_batch: "
            f"{micro_batch} apart from the others; use a group_size that {every * micro_batch} divides, or a smaller "
            "regularize_every"
        )


def load_base(config: RunConfig, device: torch.device, world: World) -> DiffusionModel:
    """Load the model on this rank's device, whole or sharded. Sets ``world.lockstep`` if it is sharded."""
    c, memory = config.model, memory_settings(config.model, device)
    world.lockstep = config.trainer.shard_base
    if not world.lockstep:
        return load_model(c.path, device, c.text_length, c.guidance, memory)
    model = load_model(c.path, torch.device("cpu"), c.text_length, c.guidance, memory)
    shard_base(model, device)
    return model


def shard_base(model: DiffusionModel, device: torch.device) -> None:
    """Shard a transformer that is in CPU memory over the devices of all ranks. It goes block by block, so no device
    ever holds the whole transformer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh: Any = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for transformer in parts_of(model.transformer).values():
        stacks = [module for module in transformer.children() if isinstance(module, nn.ModuleList)]
        for block in [block for stack in stacks for block in stack]:
            fully_shard(block, mesh=mesh)
        fully_shard(transformer, mesh=mesh)
    model.work_on(device)


def parameter_counts(transformer: nn.Module) -> tuple[int, int]:
    """Number of the base model's parameters on this rank, and in total."""
    parameters = [p for name, p in transformer.named_parameters() if "lora_" not in name]
    own = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters)
    return own, sum(p.numel() for p in parameters)
