"""What a run will need in memory, told from the model's configs alone: no weight is read.

Every part is built on torch's meta device, and the passes that a run makes are made there: tensors with a shape and a
type but no numbers. What would be allocated, and when it would be freed, is counted as the passes go by: forward,
backward, checkpointing and the fused gradients are the run's own code.

What it does not know: the allocator's gaps, workspaces of libraries, the CUDA context (about 0.5 GiB), reward models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from marble_rl import hub
from marble_rl.balancing.registry import RULES
from marble_rl.config import RunConfig
from marble_rl.gradients.fused import Mixing
from marble_rl.losses.nft import nft_loss
from marble_rl.memory.allocations import Allocations
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.mini import embedded
from marble_rl.models import PIPELINE, adapter_of, check_model_path
from marble_rl.models import pipeline as pipelines
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.pipeline import PipelineModel
from marble_rl.models.precision import MemorySettings, memory_settings
from marble_rl.types import HALVES

FLOAT = 4
"""Bytes of a float32."""
BITS = {"int8": 8.0, "nf4": 4.5}
"""Per quantised weight; nf4 has a float32 scale for every 64."""


@dataclass(frozen=True)
class Estimate:
    """Parameters by part, and bytes."""

    parameters: dict[str, int]
    """transformer, every text encoder, vae; adapter: of one copy"""
    weights: dict[str, int]
    """Bytes of the same parts; adapter: its three copies and the optimizer's two moments"""
    gradient_buffer: int
    """One row for each reward, the probe and the shared part, for both halves of the batch; a single row where the
    balance takes no gradient per reward"""
    sampling: int
    """Of a pass over ``rollout.batch_size`` images, at its highest point"""
    decoding: int
    training: int
    """Of a forward and backward pass over ``trainer.micro_batch`` samples, at its highest point"""
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
        """On the device all the time."""
        return sum(self.weights[part] for part in ("transformer", "vae", "adapter"))

    @property
    def stages(self) -> dict[str, int]:
        """The device's memory at the highest point of each stage."""
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


ESTIMATED = ("gradient_buffer", "sampling", "decoding", "training", "training_checkpointed", "rollout", "images")


def describe(found: Estimate, config: RunConfig, device: torch.device) -> list[str]:
    """The estimate in lines for people."""
    memory = memory_settings(config.model, device)
    numbers = str(memory.dtype).removeprefix("torch.") + (f", {memory.quantize} weights" if memory.quantize else "")
    lines = [f"Memory on {device.type} in {numbers}: estimated from the model's configs, not measured; in GiB."]

    def row(name: str, size: int, note: str = "") -> None:
        lines.append(f"  {name:<42}{size / (1 << 30):>9.3f}  {note}".rstrip())

    for part, count in found.parameters.items():
        note = ", in the CPU's memory when idle" if part.startswith("text_encoder") else ""
        note = " in each of three copies; with AdamW's moments" if part == "adapter" else note
        row(part, found.weights[part], f"{count / 1e6:,.3f} M parameters{note}")
    rows = "a row for each reward and two more, for two halves of a batch" if _per_reward(config) else "a single row"
    row("gradient buffer", found.gradient_buffer, rows)
    row("latents and prompts of a rollout", found.rollout)
    row("images of a rollout", found.images, "in the CPU's memory")
    row("pass of sampling", found.sampling, f"{config.rollout.images_at_once} at a time (rollout.batch_size)")
    row("decoding", found.decoding, f"model.decoding: {config.model.decoding or 'null'}")
    row("pass of training", found.training, f"{config.trainer.micro_batch} at a time (trainer.micro_batch)")
    row("  with model.gradient_checkpointing", found.training_checkpointed)
    lines.append("Highest point of each stage, without reward models, the CUDA context and gaps between tensors:")
    for stage, size in found.stages.items():
        row(stage, size)
    if config.trainer.shard_base:
        lines.append(
            "Sharded: with trainer.shard_base each of N processes keeps one Nth of the transformer, and a block at a "
            "time is whole; above, all of it is counted."
        )
    return lines


def _per_reward(config: RunConfig) -> bool:
    """Whether some steps take one gradient per reward."""
    return RULES.part_of(config.balance).uses_gradients()


def estimate(config: RunConfig, folder: Path, memory: MemorySettings) -> Estimate:
    """Of a run of the pipeline whose configs lie in ``folder``."""
    model = build_empty(config, folder)
    parameters, held = sizes(model, memory)
    with torch.device("meta"):
        LoraPolicy(model.transformer, config.lora, model.lora_targets, seed=0)
    adapter = sum(p.numel() for p in model.transformer.parameters() if p.requires_grad)

    rollout = config.rollout
    shape = model.latent_shape(rollout.height, rollout.width, rollout.frames)
    columns = len(config.trained_rewards) + 1 if _per_reward(config) else 0
    samples = rollout.groups * rollout.group_size
    conditioning = model.blank_conditioning(1).bytes * (1 if memory.dtype == torch.float32 else 0.5)
    _set_dtype(model.transformer, memory.dtype)
    _set_dtype(model.pipeline.vae, memory.vae_dtype)
    # Attention is imitated below: a backend's package need not be here, and would refuse tensors without numbers.
    model.save_memory(replace(memory, gradient_checkpointing=False, attention=None))
    with torch.device("meta"), _as_on_cuda(memory.vae_dtype):
        decoding, pixels = _decoding(model, rollout.images_at_once, shape)
    with torch.device("meta"), _as_on_cuda(memory.dtype):
        sampling = _sampling(model, rollout.images_at_once, shape)
        rows = MicroBatch(config.trainer.micro_batch, samples // rollout.updates, print).size
        rows = min(rows, samples // rollout.updates)
        training = [_training(model, rows, shape, columns)]
        model.transformer.enable_gradient_checkpointing()
        training.append(_training(model, rows, shape, columns))
    return Estimate(
        parameters={**parameters, "adapter": adapter},
        weights={**held, "adapter": (3 + 2) * adapter * FLOAT},
        gradient_buffer=(HALVES * (columns + 1) if columns else 1) * adapter * FLOAT,
        sampling=sampling,
        decoding=decoding,
        training=training[0],
        training_checkpointed=training[1],
        rollout=samples * torch.Size(shape).numel() * FLOAT + int(rollout.groups * conditioning),
        images=samples * pixels,
        checkpointing=memory.gradient_checkpointing,
    )


def estimate_run(config: RunConfig, device: torch.device) -> Estimate:
    """Of a run's config; downloads configs, not weights, of a pipeline on the hub."""
    return estimate(config, config_folder(config.model.path), memory_settings(config.model, device))


def config_folder(path: str) -> Path:
    """Where a pipeline's configs are."""
    folder = Path(embedded(path, PIPELINE))
    if folder.is_dir():
        return folder
    check_model_path(path)
    with hub.explained("model.path", path, "the pipeline's model_index.json"):
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, path, allow_patterns=["*.json"], ignore_patterns=["*.index.json"])
        try:
            hub.knock()
        except ConnectionError:
            return Path(fetch(local_files_only=True))
        return Path(fetch())


def build_empty(config: RunConfig, folder: Path) -> PipelineModel:
    """The pipeline as its configs say, without weights or tokenizers."""
    import diffusers
    import transformers

    adapter = cast(type[PipelineModel], adapter_of(folder / "model_index.json"))
    parts: dict[str, Any] = {}
    for name, entry in json.loads((folder / "model_index.json").read_text()).items():
        if name.startswith("_") or not isinstance(entry, list):
            continue
        library, kind = entry
        if kind is None or "token" in name:
            parts[name] = None
        elif library == "diffusers":
            cls = getattr(diffusers, kind)
            with torch.device("cpu" if name == "scheduler" else "meta"):
                parts[name] = cls.from_config(cls.load_config(str(folder), subfolder=name))
        else:
            cls = getattr(transformers, kind)
            with torch.device("meta"):
                parts[name] = cls(cls.config_class.from_pretrained(str(folder / name)))
            parts[name].tie_weights()
    text_length = config.model.text_length or min(adapter.default_text, _tokens(folder / adapter.text_tokenizer))
    pipeline = adapter.pipeline_class(**parts)
    if hasattr(pipeline, "tokenizer_max_length"):
        pipeline.tokenizer_max_length = min(pipeline.tokenizer_max_length, _tokens(folder / "tokenizer"))
    return adapter(pipeline, torch.device("meta"), text_length, config.model.guidance)


def _tokens(tokenizer: Path) -> int:
    """As many as it was built for."""
    settings = tokenizer / "tokenizer_config.json"
    return int(json.loads(settings.read_text()).get("model_max_length", 1 << 30)) if settings.exists() else 1 << 30


# The passes


def _sampling(model: PipelineModel, rows: int, shape: tuple[int, ...]) -> int:
    with Allocations() as counted, torch.no_grad():
        _predict(model, torch.empty(rows, *shape), torch.empty(rows))
    return counted.peak


def _decoding(model: PipelineModel, rows: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """At its highest point, and bytes of one image."""
    with Allocations() as counted:
        images = model.decode(torch.empty(rows, *shape))
    return counted.peak, images[0].numel()


def _training(model: PipelineModel, rows: int, shape: tuple[int, ...], columns: int) -> int:
    """As in gradients/policy.py, where memory is highest: the trained policy's prediction, and the first pass back."""
    params = [p for p in model.transformer.parameters() if p.requires_grad]
    buffer = torch.empty(columns, sum(p.numel() for p in params))  # counted apart
    with Allocations() as counted:
        x0, x_t, sigma = torch.empty(rows, *shape), torch.empty(rows, *shape), torch.empty(rows)
        v = _predict(model, x_t, sigma)
        loss = nft_loss(v, v, x0, x_t, sigma, beta=0.1)
        if columns:
            with Mixing(params, rows, [(torch.empty(columns, rows), buffer)]).during_backward():
                torch.autograd.grad(loss.slope, params, torch.ones(rows), retain_graph=True, allow_unused=True)
        else:
            torch.autograd.grad(loss.base, params, torch.ones(rows), allow_unused=True)
    return counted.peak


def _predict(model: PipelineModel, x: Tensor, sigma: Tensor) -> Tensor:
    return model.predict(x, sigma, model.blank_conditioning(len(x))).float()


@contextmanager
def _as_on_cuda(dtype: torch.dtype) -> Iterator[None]:
    """What the meta device lacks, as CUDA has it: autocast, attention in memory linear in the tokens, a way back."""
    functional: Any = nn.functional
    half = dtype != torch.float32
    enabled, norm = torch.is_autocast_enabled, functional.layer_norm

    def products(plain: Any) -> Any:
        """In ``dtype``, as autocast does it."""
        return lambda *tensors, **settings: plain(*(_cast(x, dtype) for x in tensors), **settings)

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(*(_cast(x, dtype) for x in (query, key, value)))

    def is_autocast_enabled(kind: str = "cuda") -> bool:
        return half if kind == "meta" else enabled(kind)

    changes: list[tuple[Any, str, Any]] = [
        (functional, "scaled_dot_product_attention", attention),
        (Tensor, "cpu", lambda tensor: tensor),
        (pipelines, "all_finite", lambda pixels: True),
        (torch, "is_autocast_enabled", is_autocast_enabled),  # asked by the fused layers
    ]
    if half:
        changes += [
            *((functional, name, products(getattr(functional, name))) for name in ("linear", "conv2d", "conv3d")),
            *((torch, name, products(getattr(torch, name))) for name in ("matmul", "bmm")),
            (functional, "layer_norm", lambda x, *rest, **settings: norm(x.float(), *rest, **settings)),
            (torch, "get_autocast_dtype", lambda kind: dtype),
        ]
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class _Attention(torch.autograd.Function):
    """Keeps its inputs, its output and one number for every query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:-1], device=query.device))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


# Sizes


def _set_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Of what is not trained; `module.to` would also change what is."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.requires_grad and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def sizes(model: PipelineModel, memory: MemorySettings) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters, and their bytes, of the transformer, the autoencoder and every text encoder."""
    modules = {"transformer": model.transformer, "vae": model.pipeline.vae}
    modules |= {name: part for name in model.text_parts if (part := getattr(model.pipeline, name)) is not None}
    held = {name: _bytes(part, memory.vae_dtype if name == "vae" else memory.dtype) for name, part in modules.items()}
    if memory.quantize is not None:
        held["transformer"] = _quantised(model.transformer, memory)
    return {name: _count(part) for name, part in modules.items()}, held


def _bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Some layers stay in float32: diffusers' always, transformers' in float16 only."""
    from diffusers import ModelMixin

    kept: tuple[str, ...] = ()
    if dtype == torch.float16 or isinstance(module, ModelMixin):
        kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    wide = sum(p.numel() for n, p in module.named_parameters() if any(part in n.split(".") for part in kept))
    return wide * FLOAT + (_count(module) - wide) * dtype.itemsize


def _quantised(module: nn.Module, memory: MemorySettings) -> int:
    """Weights of linear layers in few bits, all else in ``dtype``."""
    assert memory.quantize is not None
    linear = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    return int(linear * BITS[memory.quantize] / 8) + (_count(module) - linear) * memory.dtype.itemsize
