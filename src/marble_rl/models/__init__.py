"""Model families, and how one is found for a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from marble_rl import hub
from marble_rl.errors import InputError
from marble_rl.mini import embedded

if TYPE_CHECKING:
    import torch

    from marble_rl.models.base import DiffusionModel

FAMILIES = {"StableDiffusion3Pipeline": "marble_rl.models.sd3:SD3Model"}
"""diffusers' pipeline class -> our adapter. To add a family: one file in this folder and one line here."""


PIPELINE = "pipeline"


def check_model_path(path: str, key: str = "model.path") -> None:
    """Find what can be found wrong before anything is loaded."""
    folder = Path(embedded(path, PIPELINE))
    if folder.is_dir():
        _family(folder / "model_index.json", key)
    elif folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise InputError(
            f"{key}: no such folder: {path}. Give a folder in diffusers' format, a hub id owner/name, or mini"
        )


def load_model(path: str, device: torch.device, text_length: int | None = None) -> DiffusionModel:
    """Load a pipeline from a folder or a hub id, or the embedded one."""
    import importlib

    check_model_path(path)
    path = embedded(path, PIPELINE)
    index = Path(path) / "model_index.json"
    if not index.exists():
        index = hub.download("model.path", path, "model_index.json")
    module, _, name = FAMILIES[_family(index, "model.path")].partition(":")
    family = getattr(importlib.import_module(module), name)
    with hub.explained("model.path", path, "a pipeline in diffusers' format"):
        model: DiffusionModel = family.load(path, device, text_length)
    return model


def pick_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"model.device: unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"model.device: {name!r} asked for, but no CUDA device is available; use auto or cpu")
    return device


def _family(index: Path, key: str) -> str:
    try:
        family = json.loads(index.read_text())["_class_name"]
    except (OSError, ValueError, KeyError):
        raise InputError(
            f"{key}: {index.parent} is not a diffusers pipeline (no readable model_index.json); "
            "give the folder that `pipeline.save_pretrained` wrote"
        ) from None
    if family not in FAMILIES:
        raise InputError(f"{key}: {family} is not supported. Supported: {', '.join(FAMILIES)}")
    return str(family)
