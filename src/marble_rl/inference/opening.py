"""Open a run, an exported LoRA or a plain pipeline, and sample from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from rich.console import Console
from torch import Tensor

from marble_rl import hub
from marble_rl.config import RunConfig
from marble_rl.devices import pick_device
from marble_rl.distributed.world import is_first
from marble_rl.errors import InputError
from marble_rl.inference.lora_note import NOTE, LoraNote
from marble_rl.memory.empty_model import build_empty, config_folder
from marble_rl.models import check_model_path, load_model
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.experts import parts_of
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.models.lora_files import check_layers, holds_lora, locate_parts
from marble_rl.models.precision import PLAIN, memory_settings
from marble_rl.models.settings import ModelConfig
from marble_rl.rollout.rollout import sample
from marble_rl.rollout.solvers import Solver
from marble_rl.runs.checkpoint import Checkpoint, load_checkpoint, load_newest, restoring
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.layout import checkpoint_steps
from marble_rl.runs.manifest import DamagedCheckpoint

NOTED = ("text_length", "guidance")
"""Settings of the model that the note beside an exported LoRA keeps."""
UNREADABLE = "if marble wrote it for another program, export it with --format diffusers"
Kind = Literal["run", "LoRA", "pipeline"]
Weights = Literal["ema", "default", "old", "base", "given"]
"""An adapter of a run; `base`: the model without adapter; `given`: the weights in the file or folder."""
OFFERED: dict[Kind, tuple[Weights, ...]] = {
    "run": ("ema", "default", "old", "base"),
    "LoRA": ("given", "base"),
    "pipeline": ("given",),
}
"""Valid values of --weights, the default first."""


@dataclass(frozen=True)
class Opened:
    """A loaded model, whose weights `acting_as` selects."""

    model: DiffusionModel
    policy: LoraPolicy | None
    """The adapters of a run; None for an exported LoRA or a plain pipeline."""
    config: RunConfig | None
    step: int | None
    checkpoint: Checkpoint | None = None
    """The rest of a run's state, without the adapters, which are in the model."""

    def check_weights(self, weights: Sequence[Weights]) -> None:
        """Refuse weights that this target cannot act as. Called before the work with any of them starts."""
        encoders = (part for encoder in self.model.text_encoders for part in encoder.modules())
        if self.policy is None and "base" in weights and any(isinstance(part, BaseTunerLayer) for part in encoders):
            raise InputError(
                "--weights: 'base' is not possible for a LoRA of text encoders, because prompts are encoded once, with "
                "the LoRA; give the model itself as the target"
            )

    def acting_as(self, weights: Weights) -> AbstractContextManager[None]:
        """Sample with these weights inside the block."""
        self.check_weights([weights])
        if self.policy is None:
            return _without_lora(self.model) if weights == "base" else nullcontext()
        assert weights != "given"
        return self.policy.acting_as(weights)


@contextmanager
def _without_lora(model: DiffusionModel) -> Iterator[None]:
    """Disable the LoRA that was loaded into the model."""
    layers = [part for part in model.transformer.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def kind_of(target: str) -> Kind:
    """What a target is; one that does not exist on disk is taken for a pipeline on the hub."""
    folder = RunFolder(Path(target))
    if folder.exists:
        return "run"
    is_lora = folder.path.suffix == ".safetensors" or holds_lora(folder.path)
    return "LoRA" if is_lora else "pipeline"


def choose_weights(target: str, asked: str | None = None) -> Weights:
    """Check the value of --weights against the kind of target; None takes the kind's default."""
    kind = kind_of(target)
    if asked is None:
        return OFFERED[kind][0]
    for weights in OFFERED[kind]:
        if weights == asked:
            return weights
    fix = "leave it out" if kind == "pipeline" else f"use one of {', '.join(OFFERED[kind])}"
    raise InputError(f"--weights: {asked!r} is not among the weights of {target}, a {kind}; {fix}")


def open_target(
    target: str,
    *,
    model_path: str | None = None,
    step: int | None = None,
    device: str = "auto",
    plain: bool = False,
    settings: ModelConfig | None = None,
) -> Opened:
    """A run (its newest checkpoint, or that of ``step``), a LoRA (folder or file), or a pipeline (folder or hub id).

    ``plain`` loads a run's model in float32, whatever precision it was trained in. ``settings`` hold for everything
    that the target does not define itself; by default those of a run.
    """
    kind = kind_of(target)
    if step is not None:
        _check_has_checkpoints(target, step)
    config = model_config(target, model_path, settings)
    if kind == "run":
        return _open_run(RunFolder(Path(target)), config, step, device, plain)
    model = _load(config, device)
    if kind == "LoRA":
        transformers = parts_of(model.transformer)
        for part, file in locate_parts(Path(target), "target", list(transformers)).items():
            check_layers(file, dict(transformers[part].named_parameters()), "target")
        with hub.explained("target", str(file), "a LoRA that diffusers can load", UNREADABLE):
            model.read_lora(Path(target))
        parts = (part for whole in (model.transformer, *model.text_encoders) for part in whole.modules())
        if not any(isinstance(part, BaseTunerLayer) for part in parts):  # diffusers skips names that it does not know
            raise InputError(f"target: diffusers finds no layer of {model.name} in {file}; {UNREADABLE}")
    return Opened(model, None, None, None)


def model_config(target: str, model_path: str | None = None, settings: ModelConfig | None = None) -> ModelConfig:
    """The model of a target and how to load it: what the target defines itself, otherwise ``settings``."""
    kind = kind_of(target)
    if model_path is not None and kind != "LoRA":
        raise InputError(
            f"--model: {model_path!r} given, but {target} is a {kind}, which names its model; leave it out"
        )
    if kind == "run":
        return settings or RunFolder(Path(target)).load_config().model
    own = own_settings(target)
    if model_path is not None:
        own["path"] = model_path
    if own["path"] is None:
        raise InputError(f"{target}: the LoRA does not name its base model; give --model")
    check_model_path(own["path"], "--model" if kind == "LoRA" else "target")
    given = {} if settings is None else settings.model_dump()
    return ModelConfig.model_validate({**given, **own})


def own_settings(target: str) -> dict[str, Any]:
    """The settings of its model that a target defines itself; they cannot be overridden."""
    kind = kind_of(target)
    if kind == "pipeline":
        return {"path": target}
    if kind == "LoRA":
        file = next(iter(locate_parts(Path(target), "target").values())).parent / NOTE
        note = LoraNote.read(file) if file.exists() else LoraNote()
        return {"path": note.base_model, **note.model_dump(include=note.model_fields_set.intersection(NOTED))}
    own = RunFolder(Path(target)).load_config().model
    return {key: getattr(own, key) for key in ("path", *NOTED)}


def _load(config: ModelConfig, device: str, plain: bool = False) -> DiffusionModel:
    chosen = pick_device(device, "--device")
    memory = PLAIN if plain else memory_settings(config, chosen)
    return load_model(config.path, chosen, config.text_length, config.guidance, memory)


def _open_run(folder: RunFolder, settings: ModelConfig, step: int | None, device: str, plain: bool) -> Opened:
    config = folder.load_config()
    checkpoint = read_checkpoint(folder, step)
    model = _load(settings, device, plain)
    policy = _restored_policy(model, config, checkpoint, folder.path)
    return Opened(model, policy, config, checkpoint.step, replace(checkpoint, adapters={}))


def open_without_weights(run: Path, step: int | None) -> Opened:
    """A run's adapters on a model on torch's meta device. Enough to write a LoRA, without loading the base weights."""
    folder = RunFolder(run)
    config = folder.load_config()
    checkpoint = read_checkpoint(folder, step)
    model = build_empty(config, config_folder(config.model.path))
    with torch.device("meta"):
        _restored_policy(model, config, checkpoint, folder.path)
    tensors = {
        name.replace(f".{kind}.", f".{kind}.{adapter}."): tensor
        for adapter in ADAPTERS
        for name, tensor in checkpoint.adapter(adapter).items()
        for kind in ("lora_A", "lora_B")
        if f".{kind}." in name
    }
    model.transformer.load_state_dict(tensors, strict=False, assign=True)
    return Opened(model, None, config, checkpoint.step)


def _restored_policy(model: DiffusionModel, config: RunConfig, checkpoint: Checkpoint, run: Path) -> LoraPolicy:
    lora = config.lora.model_copy(update={"init": None})  # the checkpoint replaces the initial weights
    policy = LoraPolicy(model.transformer, lora, model.lora_targets, config.trainer.seed)
    with restoring(checkpoint, run):
        for adapter in ADAPTERS:
            policy.load_tensors(adapter, checkpoint.adapter(adapter))
    return policy


def chosen_step(target: str, checkpoint: str | None) -> int | None:
    """The step that --checkpoint names: a number, `best` or `newest`, which is None."""
    if checkpoint is None or checkpoint == "newest":
        return None
    _check_has_checkpoints(target, checkpoint)
    if checkpoint == "best":
        return _best_step(RunFolder(Path(target)))
    if not re.fullmatch("[0-9]{1,18}", checkpoint):
        raise InputError(f"--checkpoint: {checkpoint!r} is no checkpoint; give best, newest or the number of a step")
    return int(checkpoint)


def _check_has_checkpoints(target: str, given: object) -> None:
    kind = kind_of(target)
    if kind != "run":
        raise InputError(
            f"--checkpoint: {given} given, but {target} is a {kind}, which has no checkpoints; leave it out"
        )


def _best_step(folder: RunFolder) -> int:
    """From the state of the newest checkpoint (training/best.py)."""
    folder.load_config()
    best = read_checkpoint(folder, None).state.get("best")
    if best is None:
        raise InputError(
            f"--checkpoint: {folder.path} has no best one: its training had no validation. It needs prompts.validation "
            "and trainer.eval_every (docs/runs.md)"
        )
    if best["step"] is None:
        raise InputError(
            f"--checkpoint: {folder.path} has no best one: no evaluation so far counts, see its log (docs/runs.md)"
        )
    if is_first():
        text = f"best checkpoint: step {best['step']}, validation score {best['score']:+.3f} (the base model: 0)"
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
    return int(best["step"])


def read_checkpoint(folder: RunFolder, step: int | None) -> Checkpoint:
    """The checkpoint of ``step``; None takes the newest that is undamaged."""
    available = checkpoint_steps(folder.checkpoints)
    if step is None:
        warnings: list[str] = []
        newest = load_newest(folder.checkpoints, warnings.append)
        if newest is None:
            raise InputError(f"{folder.path} has no usable checkpoint yet. {' '.join(warnings)}".strip())
        for warning in warnings:
            Console(stderr=True).print(warning, markup=False, soft_wrap=True)
        return newest
    if step not in available:
        raise InputError(f"--checkpoint: {folder.path} has no checkpoint of step {step}; it has {available}")
    try:
        return load_checkpoint(folder.checkpoints / f"step-{step}")
    except DamagedCheckpoint as damage:
        raise InputError(f"--checkpoint: the checkpoint of step {step} is damaged: {damage}") from None


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
    prompt_cache: PromptCache | None = None,
) -> Iterator[Tensor]:
    """Yield one image [H, W, 3] uint8, or video [F, H, W, 3], after the other.

    Image i starts from ``torch.Generator().manual_seed(seed + i)``, as diffusers does. ``prompt_cache``: of a caller
    that samples several prompts, or one several times.
    """
    model = opened.model
    shape = model.latent_shape(height, width, frames)
    conditioning = (prompt_cache or PromptCache(model)).encode([prompt])
    for i in range(images):
        noise = torch.randn((1, *shape), generator=torch.Generator().manual_seed(seed + i))
        _, (picture,) = sample(model, noise, conditioning, model.sigmas(steps, shape), solver)
        yield picture
