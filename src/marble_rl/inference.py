"""Using what was trained: open a run, an exported LoRA or a plain pipeline, and sample from it."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marble_rl.checkpoint import Checkpoint, DamagedCheckpoint, checkpoint_steps, load_checkpoint, load_newest
from marble_rl.config import RunConfig
from marble_rl.config.schema import ModelConfig
from marble_rl.errors import InputError
from marble_rl.models import check_model_path, load_model, pick_device
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import ADAPTERS, LoraPolicy, Role
from marble_rl.precision import memory_settings
from marble_rl.rollout.rollout import sample
from marble_rl.rollout.solvers import Solver
from marble_rl.runfolder import RunFolder
from marble_rl.storage import storage_errors, write_bytes, write_json

LORA_FILE = "pytorch_lora_weights.safetensors"
CARD = "marble.json"


@dataclass(frozen=True)
class Opened:
    """A model with weights to choose from."""

    model: DiffusionModel
    policy: LoraPolicy | None
    """Present for a run: its adapters. None for an exported LoRA (always on) or a plain pipeline."""
    config: RunConfig | None
    step: int | None

    def acting_as(self, role: Role) -> AbstractContextManager[None]:
        return nullcontext() if self.policy is None else self.policy.acting_as(role)


def open_target(target: str, *, model_path: str | None = None, step: int | None = None, device: str = "auto") -> Opened:
    """A run folder (newest checkpoint, or that of ``step``), a LoRA folder, or a pipeline (folder or hub id)."""
    folder = RunFolder(Path(target))
    if folder.exists:
        return _open_run(folder, step, device)
    if (folder.path / LORA_FILE).is_file():
        card = read_card(folder.path)
        base = model_path or card.get("base_model")
        if base is None:
            raise InputError(f"{target}: the LoRA does not say which model it belongs to; give --model")
        check_model_path(base, "--model")
        model = _load(
            ModelConfig(path=base, text_length=card.get("text_length"), guidance=card.get("guidance")), device
        )
        model.read_lora(folder.path)
        return Opened(model, None, None, None)
    check_model_path(target, "target")
    return Opened(_load(ModelConfig(path=target), device), None, None, None)


def _load(config: ModelConfig, device: str) -> DiffusionModel:
    chosen = pick_device(device)
    return load_model(config.path, chosen, config.text_length, config.guidance, memory_settings(config, chosen))


def _open_run(folder: RunFolder, step: int | None, device: str) -> Opened:
    config = folder.load_config()
    checkpoint = read_checkpoint(folder, step)
    model = _load(config.model, device)
    policy = LoraPolicy(model.transformer, config.lora, model.lora_targets, config.trainer.seed)
    for adapter in ADAPTERS:
        policy.load_tensors(adapter, checkpoint.adapter(adapter))
    return Opened(model, policy, config, checkpoint.step)


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


def export_lora(opened: Opened, role: Role, out: Path) -> None:
    """Write a folder that plain diffusers loads, with a note of where it comes from."""
    assert opened.policy is not None
    assert opened.config is not None
    config = opened.config
    card = {
        "base_model": config.model.path,
        "text_length": config.model.text_length,
        "guidance": config.model.guidance,
        "step": opened.step,
        "weights": role,
        "rewards": list(config.trained_rewards),
        "balance": config.balance.type,
    }
    with storage_errors(str(out)):
        out.mkdir(parents=True, exist_ok=True)
        opened.model.write_lora(out, role)
        write_json(out / CARD, card)
        write_bytes(out / "README.md", _readme(opened.model, config, opened.step, role).encode())


def read_card(folder: Path) -> dict[str, Any]:
    """What ``export_lora`` noted, or nothing."""
    try:
        card: dict[str, Any] = json.loads((folder / CARD).read_text())
        return card
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{folder / CARD} is not valid JSON ({error}); mend or delete it") from None


def _readme(model: DiffusionModel, config: RunConfig, step: int | None, role: str) -> str:
    rewards = "\n".join(f"- {name}" for name in config.trained_rewards)
    pipeline, arguments = model.plain_call()
    size = {"height": config.rollout.height, "width": config.rollout.width, "num_frames": config.rollout.frames}
    given = arguments | {name: value for name, value in size.items() if value is not None}
    call = ", ".join(['"a prompt"', *(f"{name}={value}" for name, value in given.items())])
    sample, samples = ("video", "frames") if model.makes_videos else ("image", "images")
    return f"""# LoRA for {Path(config.model.path).name}

Fine-tuned with marble ({config.balance.type}, {step} steps, {role} weights) on these rewards:

{rewards}

Call it as it was trained, without classifier-free guidance:

```python
from diffusers import {pipeline}

pipe = {pipeline}.from_pretrained("{config.model.path}")
pipe.load_lora_weights("THIS_FOLDER")
{sample} = pipe({call}).{samples}[0]
```
"""
