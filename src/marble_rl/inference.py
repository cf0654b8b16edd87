"""Using what was trained: open a run, an exported LoRA or a plain pipeline, and sample from it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marble_rl.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_steps,
    load_checkpoint,
    load_newest,
    restoring,
)
from marble_rl.config import RunConfig
from marble_rl.config.schema import ModelConfig
from marble_rl.errors import InputError
from marble_rl.models import check_model_path, load_model, pick_device
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import ADAPTERS, LoraPolicy, Role
from marble_rl.models.lora_files import LORA_FILE, check_layers, locate
from marble_rl.precision import PLAIN, memory_settings
from marble_rl.rollout.rollout import sample
from marble_rl.rollout.solvers import Solver
from marble_rl.runfolder import RunFolder

CARD = "marble.json"
"""What an exported LoRA belongs to, for us; README.md says it to people."""


@dataclass(frozen=True)
class Opened:
    """A model with weights to choose from."""

    model: DiffusionModel
    policy: LoraPolicy | None
    """Present for a run: its adapters. None for an exported LoRA (always on) or a plain pipeline."""
    config: RunConfig | None
    step: int | None
    checkpoint: Checkpoint | None = None
    """Of a run: the rest of its state. The adapters, which the model has by now, are left out."""

    def acting_as(self, role: Role) -> AbstractContextManager[None]:
        return nullcontext() if self.policy is None else self.policy.acting_as(role)


def open_target(
    target: str, *, model_path: str | None = None, step: int | None = None, device: str = "auto", plain: bool = False
) -> Opened:
    """A run (its newest checkpoint, or that of ``step``), a LoRA (folder or file), or a pipeline (folder or hub id).

    ``plain`` reads a run's model in float32, whatever it was trained in.
    """
    folder = RunFolder(Path(target))
    if folder.exists:
        return _open_run(folder, step, device, plain)
    if folder.path.suffix == ".safetensors" or (folder.path / LORA_FILE).is_file():
        file = locate(folder.path, "target")
        card = read_card(file.parent)
        base = model_path or card.get("base_model")
        if base is None:
            raise InputError(f"{target}: the LoRA does not say which model it belongs to; give --model")
        check_model_path(base, "--model")
        settings = ModelConfig(path=base, text_length=card.get("text_length"), guidance=card.get("guidance"))
        model = _load(settings, device)
        check_layers(file, dict(model.transformer.named_parameters()), "target")
        model.read_lora(file)
        return Opened(model, None, None, None)
    check_model_path(target, "target")
    return Opened(_load(ModelConfig(path=target), device), None, None, None)


def _load(config: ModelConfig, device: str, plain: bool = False) -> DiffusionModel:
    chosen = pick_device(device)
    memory = PLAIN if plain else memory_settings(config, chosen)
    return load_model(config.path, chosen, config.text_length, config.guidance, memory)


def _open_run(folder: RunFolder, step: int | None, device: str, plain: bool) -> Opened:
    config = folder.load_config()
    checkpoint = read_checkpoint(folder, step)
    model = _load(config.model, device, plain)
    lora = config.lora.model_copy(update={"init": None})  # the checkpoint has it all
    policy = LoraPolicy(model.transformer, lora, model.lora_targets, config.trainer.seed)
    with restoring(checkpoint, folder.path):
        for adapter in ADAPTERS:
            policy.load_tensors(adapter, checkpoint.adapter(adapter))
    return Opened(model, policy, config, checkpoint.step, replace(checkpoint, adapters={}))


def read_checkpoint(folder: RunFolder, step: int | None) -> Checkpoint:
    """The newest undamaged checkpoint of a run, or that of one step."""
    available = checkpoint_steps(folder.checkpoints)
    if step is None:
        warnings: list[str] = []
        newest = load_newest(folder.checkpoints, warnings.append)
        if newest is None:
            raise InputError(f"{folder.path} has no usable checkpoint yet. {' '.join(warnings)}".strip())
        return newest
    if step not in available:
        raise InputError(f"--step: {folder.path} has no checkpoint of step {step}; it has {available}")
    try:
        return load_checkpoint(folder.checkpoints / f"step-{step}")
    except DamagedCheckpoint as damage:
        raise InputError(f"--step: the checkpoint of step {step} is damaged: {damage}") from None


def sample_images(
    opened: Opened,
    prompt: str,
    *,
    seed: int,
    images: int,
    steps: int,
    solver: Solver,
    height: int | None,
    width: int | None,
    frames: int | None = None,
) -> Tensor:
    """Images [B, H, W, 3] uint8, or videos [B, F, H, W, 3].

    Image i starts from ``torch.Generator().manual_seed(seed + i)``, as diffusers does.
    """
    model = opened.model
    shape = model.latent_shape(height, width, frames)
    conditioning = PromptCache(model).encode([prompt])
    pictures = []
    for i in range(images):
        noise = torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed + i))
        pictures.append(sample(model, noise, conditioning, model.sigmas(steps, shape), solver)[1])
    return torch.cat(pictures)


def read_card(folder: Path) -> dict[str, Any]:
    """What an export noted, or nothing."""
    try:
        card: dict[str, Any] = json.loads((folder / CARD).read_text())
        return card
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{folder / CARD} is not valid JSON ({error}); mend or delete it") from None
