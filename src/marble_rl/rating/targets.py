"""What `marble rate prepare` is given: runs, LoRAs, pipelines and folders of pictures, with or without a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from marble_rl.errors import InputError
from marble_rl.inference.opening import Kind, kind_of, model_config, own_settings, read_checkpoint
from marble_rl.models.settings import ModelConfig
from marble_rl.rating.study import RatedModel
from marble_rl.runs.folder import RunFolder

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
"""Suffixes in a folder of pictures."""
FEWEST = 2


def read_targets(arguments: Sequence[str], base_model: str | None) -> list[RatedModel]:
    """The models, each NAME=TARGET or TARGET alone, which is named after its folder. Loads no model."""
    if len(arguments) < FEWEST:
        raise InputError(f"TARGET: {len(arguments)} given; a rating compares two or more")
    models = [_rated(*_split(argument), base_model) for argument in arguments]
    if base_model is not None and all(model.kind != "LoRA" for model in models):
        raise InputError(f"--model: {base_model!r} given, but no target is a LoRA; leave it out")
    for model in models:
        same = [other.target for other in models if other.name == model.name]
        if len(same) > 1:
            raise InputError(
                f"TARGET: {' and '.join(same)} have the same name, {model.name}; name them: "
                f"{model.name}-1={same[0]} {model.name}-2={same[1]}"
            )
    return models


def _split(argument: str) -> tuple[str, str]:
    """Name and target. A path that exists is a target, even with a = in it."""
    name, given, target = argument.partition("=")
    if Path(argument).exists() or not given:
        path = Path(argument)
        return re.sub(r"[^A-Za-z0-9_.-]", "_", (path.resolve() if path.exists() else path).name), argument
    if not re.fullmatch(r"\w[A-Za-z0-9_.-]*", name, re.ASCII):
        raise InputError(f"TARGET: {argument!r}: the name {name!r} may have letters, digits, _, - and . only")
    return name, target


def _rated(name: str, target: str, base_model: str | None) -> RatedModel:
    if picture_files(target):
        return RatedModel(name=name, target=target, kind="pictures")
    kind = kind_of(target)
    model_config(target, _base(kind, base_model))  # refuses a target that cannot be opened
    step = read_checkpoint(RunFolder(Path(target)), None).step if kind == "run" else None
    return RatedModel(name=name, target=target, kind=kind, step=step)


def _base(kind: Kind, base_model: str | None) -> str | None:
    """--model is for LoRAs alone."""
    return base_model if kind == "LoRA" else None


def picture_files(target: str) -> list[Path]:
    """The pictures of a folder that is nothing else, in the order of the numbers in their names: 2 before 10."""
    folder = Path(target)
    if not folder.is_dir() or kind_of(target) != "pipeline" or (folder / "model_index.json").exists():
        return []
    return sorted((file for file in folder.iterdir() if file.suffix.lower() in PICTURES), key=_natural)


def _natural(file: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", file.stem)]


def settings_for(target: str, base_model: str | None, runs: Sequence[ModelConfig]) -> ModelConfig:
    """How to load a target. What it does not define itself is as in the run among the targets that has the same base
    model: so the base model of a run is loaded as the run loads it."""
    base = _base(kind_of(target), base_model)
    path = base or own_settings(target)["path"]
    known = next((run for run in runs if run.path in (path, str(Path(path).resolve()))), None)
    return model_config(target, base, None if kind_of(target) == "run" else known)
