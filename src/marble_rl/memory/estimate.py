"""An estimate of the memory that a run needs, from the model's configs alone: no weights are read.

Every part is built on torch's meta device, whose tensors have a shape and a dtype but no values. The passes of a run
are made there, with the run's own code for forward, backward, checkpointing and fused gradients, while every
allocation and its end are counted.

Not included: fragmentation of the allocator, workspaces of libraries, the CUDA context (about 0.5 GiB), reward models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from marble_rl.balancing.registry import RULES
from marble_rl.config import RunConfig
from marble_rl.gradients.fused import ColumnSums
from marble_rl.gradients.halves import SAMPLED, buffer_numbers
from marble_rl.losses.base import Loss, Noised
from marble_rl.losses.registry import LOSSES
from marble_rl.memory.allocations import Allocations
from marble_rl.memory.cuda_on_meta import as_on_cuda
from marble_rl.memory.empty_model import build_empty, config_folder
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.base import DiffusionModel
from marble_rl.models.experts import parts_of
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.parts import TRANSFORMERS
from marble_rl.models.precision import BITS, MemorySettings, memory_settings

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Estimate:
    """Numbers of parameters, and bytes."""

    parameters: dict[str, int]
    """By part: each transformer, each text encoder, vae, adapter (one copy of it)"""
    weights: dict[str, int]
    """Bytes of the same parts; of the adapter: its three copies and the optimizer's two moments"""
    gradient_buffer: int
    """One row for each reward, the probe and the shared part, for both halves of the batch; a single row if the
    balancing rule needs no gradient per reward"""
    rule: int
    """What the balancing rule keeps, such as one momentum per reward"""
    sampling: int
    """Peak of a forward pass over ``rollout.batch_size`` images"""
    decoding: int
    """Peak of decoding as many"""
    training: int
    """Peak of a forward and backward pass over ``trainer.micro_batch`` samples"""
    training_checkpointed: int
    """The same with model.gradient_checkpointing"""
    rollout: int
    """Latents and prompt embeddings of a rollout, on the device"""
    images: int
    """Images of a rollout, in the CPU's memory"""
    checkpointing: bool

    @property
    def text_encoders(self) -> int:
        return sum(size for part, size in self.weights.items() if part.startswith("text_encoder"))

    @property
    def resident(self) -> int:
        """On the device throughout the run."""
        return sum(self.weights.values()) - self.text_encoders + self.rule

    @property
    def stages(self) -> dict[str, int]:
        """Peak memory of the device in each stage."""
        training = self.training_checkpointed if self.checkpointing else self.training
        return {
            "prompts (text encoders visit the device)": self.resident + self.text_encoders,
            "rollout, sampling": self.resident + self.rollout + self.sampling,
            "rollout, decoding": self.resident + self.rollout + self.decoding,
            "gradients": self.resident + self.rollout + self.gradient_buffer + training,
        }

    @property
    def peak(self) -> int:
        return max(self.stages.values())

    def to_json(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ESTIMATED}
        parts = {"parameters": self.parameters, "weights": self.weights}
        return {**parts, **sizes, "stages": self.stages, "peak": self.peak}


ESTIMATED = (
    "gradient_buffer",
    "rule",
    "sampling",
    "decoding",
    "training",
    "training_checkpointed",
    "rollout",
    "images",
)


def describe(estimated: Estimate, config: RunConfig, device: torch.device) -> list[str]:
    """The estimate as lines of text."""
    memory = memory_settings(config.model, device)
    precision = str(memory.dtype).removeprefix("torch.") + (f", {memory.quantize} weights" if memory.quantize else "")
    lines = [f"Memory on {device.type} in {precision}: estimated from the model's configs, not measured; in GiB."]

    def row(name: str, size: int, note: str = "") -> None:
        lines.append(f"  {name:<42}{size / (1 << 30):>9.3f}  {note}".rstrip())

    for part, count in estimated.parameters.items():
        note = ", in the CPU's memory when idle" if part.startswith("text_encoder") else ""
        note = " in each of three copies; with AdamW's moments" if part == "adapter" else note
        row(part, estimated.weights[part], f"{count / 1e6:,.3f} M parameters{note}")
    rows = "a row for each reward and two more, for two halves of a batch" if _per_reward(config) else "a single row"
    row("gradient buffer", estimated.gradient_buffer, rows)
    if estimated.rule:
        row("balancing rule", estimated.rule, "one momentum per reward")
    row("latents and prompts of a rollout", estimated.rollout)
    row("images of a rollout", estimated.images, "in the CPU's memory")
    row("pass of sampling", estimated.sampling, f"{config.rollout.images_at_once} at a time (rollout.batch_size)")
    row("decoding", estimated.decoding, f"model.decoding: {config.model.decoding or 'null'}")
    row("pass of training", estimated.training, f"{config.trainer.micro_batch} at a time (trainer.micro_batch)")
    row("  with model.gradient_checkpointing", estimated.training_checkpointed)
    lines.append("Peak of each stage, without reward models, the CUDA context and fragmentation:")
    for stage, size in estimated.stages.items():
        row(stage, size)
    if config.trainer.shard_base:
        lines.append(
            "Sharded: with trainer.shard_base each of N ranks keeps one Nth of the transformer, and gathers one block "
            "at a time; the figures above count all of it."
        )
    return lines


def _per_reward(config: RunConfig) -> bool:
    """Whether some steps take one gradient per reward."""
    return config.uses_gradients


def estimate(config: RunConfig, folder: Path, memory: MemorySettings) -> Estimate:
    """Estimate a run of the pipeline whose configs are in ``folder``."""
    model = build_empty(config, folder)
    parameters, held = sizes(model, memory)
    with torch.device("meta"):
        LoraPolicy(model.transformer, config.lora, model.lora_targets, seed=0)
    adapter = sum(p.numel() for p in model.transformer.parameters() if p.requires_grad)

    loss = LOSSES.part_of(config.loss)(config.loss)
    rollout = config.rollout
    shape = model.latent_shape(rollout.height, rollout.width, rollout.frames)
    columns = len(config.trained_rewards) + 1 if _per_reward(config) else 0
    samples = rollout.groups * rollout.group_size
    conditioning = model.blank_conditioning(1).bytes * (1 if memory.dtype == torch.float32 else 0.5)
    _set_dtype(model.transformer, memory.dtype)
    _set_dtype(model.pipeline.vae, memory.vae_dtype)
    # Attention is imitated below: the backend's package may be missing here, and would refuse meta tensors.
    model.save_memory(replace(memory, gradient_checkpointing=False, attention=None))
    with torch.device("meta"), as_on_cuda(memory.vae_dtype):
        decoding, pixels = _decoding(model, rollout.images_at_once, shape)
    with torch.device("meta"), as_on_cuda(memory.dtype):
        sampling = _sampling(model, rollout.images_at_once, shape)
        rows = MicroBatch(config.trainer.micro_batch, samples // rollout.updates, print).size
        rows = min(rows, samples // rollout.updates)
        training = [_training(model, loss, rows, shape, columns)]
        model.transformer.enable_gradient_checkpointing()
        training.append(_training(model, loss, rows, shape, columns))
    rule = RULES.part_of(config.balance)
    return Estimate(
        parameters={**parameters, "adapter": adapter},
        weights={**held, "adapter": (3 + 2) * adapter * FLOAT},
        gradient_buffer=buffer_numbers(columns, adapter, SAMPLED if rule.keeps_halves else 0) * FLOAT,
        rule=rule.bytes_per_parameter(config.trained_rewards, list(config.guards)) * adapter,
        sampling=sampling,
        decoding=decoding,
        training=training[0],
        training_checkpointed=training[1],
        rollout=samples * torch.Size(shape).numel() * FLOAT + int(rollout.groups * conditioning),
        images=samples * pixels,
        checkpointing=memory.gradient_checkpointing,
    )


def estimate_run(config: RunConfig, device: torch.device) -> Estimate:
    """Estimate a run. Of a pipeline on the hub it downloads the configs, not the weights."""
    return estimate(config, config_folder(config.model.path), memory_settings(config.model, device))


def _sampling(model: DiffusionModel, rows: int, shape: tuple[int, ...]) -> int:
    """Peak bytes of one forward pass."""
    with Allocations() as counted, torch.no_grad():
        _predict(model, torch.empty(rows, *shape), torch.empty(rows))
    return counted.peak


def _decoding(model: DiffusionModel, rows: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """Peak bytes, and the bytes of one decoded image."""
    with Allocations() as counted:
        images = model.decode(torch.empty(rows, *shape))
    return counted.peak, images[0].numel()


def _training(model: DiffusionModel, loss: Loss, rows: int, shape: tuple[int, ...], columns: int) -> int:
    """Peak bytes of a training pass: the trained policy's prediction and the first backward pass through it."""
    params = [p for p in model.transformer.parameters() if p.requires_grad]
    buffer = torch.empty(columns, sum(p.numel() for p in params))  # counted as `gradient_buffer`
    with Allocations() as counted:
        x0, x_t = torch.empty(rows, *shape), torch.empty(rows, *shape)
        sample = Noised(
            x0, x0, x_t, torch.empty(rows)
        )  # latents are small beside activations: two of three are counted
        v = _predict(model, x_t, sample.t)
        terms = loss.terms(v, v, sample)
        if columns:
            with ColumnSums(params, rows, torch.empty(columns, rows), buffer).during_backward():
                torch.autograd.grad(terms.slope, params, torch.ones(rows), retain_graph=True, allow_unused=True)
        else:
            torch.autograd.grad(terms.base + terms.slope, params, torch.ones(rows), allow_unused=True)
    return counted.peak


def _predict(model: DiffusionModel, x: Tensor, sigma: Tensor) -> Tensor:
    return model.predict(x, sigma, model.blank_conditioning(len(x))).float()


def _set_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the frozen parameters and buffers; `module.to` would also cast the trained ones."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.requires_grad and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def sizes(model: DiffusionModel, memory: MemorySettings) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers of parameters, and their bytes, of every transformer, the autoencoder and every text encoder."""
    transformers = dict(zip(TRANSFORMERS, parts_of(model.transformer).values(), strict=False))
    modules = {**transformers, "vae": model.pipeline.vae}
    modules |= {name: part for name in model.text_parts if (part := getattr(model.pipeline, name)) is not None}
    held = {name: _bytes(part, memory.vae_dtype if name == "vae" else memory.dtype) for name, part in modules.items()}
    if memory.quantize is not None:
        held |= {name: _quantised(part, memory) for name, part in transformers.items()}
    return {name: _count(part) for name, part in modules.items()}, held


def _bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes in ``dtype``. Some layers stay in float32: those of diffusers always, those of transformers in float16."""
    from diffusers import ModelMixin

    kept: tuple[str, ...] = ()
    if dtype == torch.float16 or isinstance(module, ModelMixin):
        kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    wide = sum(p.numel() for n, p in module.named_parameters() if any(part in n.split(".") for part in kept))
    return wide * FLOAT + (_count(module) - wide) * dtype.itemsize


def _quantised(module: nn.Module, memory: MemorySettings) -> int:
    """Bytes with the weights of linear layers quantised, everything else in ``dtype``."""
    assert memory.quantize is not None
    linear = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    return int(linear * BITS[memory.quantize] / 8) + (_count(module) - linear) * memory.dtype.itemsize
