"""The files and folders that a config names: relative ones count from the config's own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marble_rl.config.run import RunConfig
from marble_rl.config.trackers import TensorboardTracker, TrackerConfig
from marble_rl.mini import MINI
from marble_rl.prompts.settings import PromptSourceConfig

REWARD_FILES = ("model", "processor", "head", "colour_model")
"""Parameters of rewards that may name a file or folder."""


def with_absolute_paths(config: RunConfig, folder: Path) -> RunConfig:
    """Resolve the files and folders that it names, so that the saved config means the same from anywhere."""
    model = config.model
    if model.path != MINI:
        model = model.model_copy(update={"path": _absolute_model(model.path, folder)})
    lora = config.lora
    if lora.init is not None:
        lora = lora.model_copy(update={"init": (folder / lora.init).resolve()})
    prompts = config.prompts
    absolute: dict[str, Any] = {}
    for split in ("train", "heldout"):
        sources = getattr(prompts, split)
        if sources is not None:
            absolute[split] = [_with_absolute_files(source, folder) for source in sources]
    trackers = [_with_absolute_dir(tracker, folder) for tracker in config.logging.trackers]
    logging = config.logging.model_copy(update={"trackers": trackers})
    rewards = [r.model_copy(update={"params": _with_absolute_params(r.params, folder)}) for r in config.rewards]
    sections = {"model": model, "lora": lora, "prompts": prompts.model_copy(update=absolute), "logging": logging}
    return config.model_copy(update={**sections, "rewards": rewards})


def _absolute_model(path: str, folder: Path) -> str:
    """One that lies in neither the config's folder nor the current one, where `--set` is typed, is an id on the hub."""
    for candidate in (folder / path, Path(path)):
        if candidate.is_dir():
            return str(candidate.resolve())
    return path


def _with_absolute_params(params: Any, folder: Path, key: str = "") -> Any:
    """Models and heads that lie in the config's folder; what does not may be an id on the hub, or a server's name."""
    if isinstance(params, dict):
        return {name: _with_absolute_params(value, folder, name) for name, value in params.items()}
    if key in REWARD_FILES and isinstance(params, str) and params != MINI and (folder / params).exists():
        return str((folder / params).resolve())
    return params


def _with_absolute_dir(tracker: TrackerConfig, folder: Path) -> TrackerConfig:
    if isinstance(tracker, TensorboardTracker) and tracker.dir is not None:
        return tracker.model_copy(update={"dir": (folder / tracker.dir).resolve()})
    return tracker


def _with_absolute_files(source: PromptSourceConfig, folder: Path) -> PromptSourceConfig:
    if source.file is not None:
        return source.model_copy(update={"file": (folder / source.file).resolve()})
    if source.generate is not None and source.generate.exclude is not None:
        exclude = (folder / source.generate.exclude).resolve()
        return source.model_copy(update={"generate": source.generate.model_copy(update={"exclude": exclude})})
    return source
