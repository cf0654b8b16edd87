"""Model families, and the choice of a family for a model path."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from marble_rl import hub
from marble_rl.errors import InputError
from marble_rl.mini import MINI_VIDEO, PIPELINE, embedded
from marble_rl.section import shown
from marble_rl.storage import read_json

if TYPE_CHECKING:
    import torch

    from marble_rl.models.base import DiffusionModel
    from marble_rl.models.precision import MemorySettings
    from marble_rl.types import Media

FAMILIES = {
    "StableDiffusion3Pipeline": "marble_rl.models.sd3:SD3Model",
    "FluxPipeline": "marble_rl.models.flux:FluxModel",
    "QwenImagePipeline": "marble_rl.models.qwen_image:QwenImageModel",
    "WanPipeline": "marble_rl.models.wan:WanModel",
}
"""diffusers' pipeline class -> our model class. To add a family: one file in this folder and one line here."""

LIBRARIES = ("diffusers", "transformers", None)
"""That the parts of a pipeline may come from; None: there is no such part."""


def check_model_path(path: str, key: str = "model.path") -> None:
    """Refuse a path that cannot be a supported pipeline, before anything is loaded."""
    folder = Path(embedded(path, PIPELINE))
    if os.path.isdir(folder):  # unlike Path's, False where permission is denied
        _family(folder / "model_index.json", key)
        _check_safetensors(folder, key)
    elif path == MINI_VIDEO:
        raise InputError(
            f"{key}: the weights of {path} are not in this installation; `python -m tools.mini_video.build FOLDER` in "
            "the repository trains them, then give FOLDER/pipeline"
        )
    elif hub.looks_local(path) or path.count("/") != 1:
        raise InputError(
            f"{key}: no such folder: {path}. Give a folder in diffusers' format, a hub id owner/name, or mini"
        )


def check_model_settings(
    path: str, text_length: int | None = None, guidance: float | None = None, frames: int | None = None
) -> None:
    """Refuse settings that the model's family does not have, if the model is a local folder; the hub is not asked."""
    folder = Path(embedded(path, PIPELINE))
    given = {text_length, guidance, frames} != {None}
    if given and folder.is_dir():  # otherwise diffusers need not be imported
        adapter_of(folder / "model_index.json").check_settings(text_length, guidance, frames)


def known_media(path: str) -> Media | None:
    """Whether the model makes images or videos; None if that is known only to the hub."""
    folder = Path(embedded(path, PIPELINE))
    return adapter_of(folder / "model_index.json").media() if folder.is_dir() else None


def load_model(
    path: str,
    device: torch.device,
    text_length: int | None = None,
    guidance: float | None = None,
    memory: MemorySettings | None = None,
) -> DiffusionModel:
    """Load a pipeline from a folder or a hub id, or the embedded one; in float32 unless ``memory`` says otherwise."""
    check_model_path(path)
    path = embedded(path, PIPELINE)
    index = Path(path) / "model_index.json"
    if not index.exists():
        index = hub.download("model.path", path, "model_index.json")
    adapter = adapter_of(index)
    adapter.check_settings(text_length, guidance)
    if memory is not None and memory.quantize is not None:
        check_quantization(memory.quantize, device)
    with hub.explained("model.path", path, "a pipeline in diffusers' format"):
        return adapter.load(path, device, text_length, guidance, *([] if memory is None else [memory]))


def check_quantization(quantize: str, device: torch.device) -> None:
    """Refuse quantisation whose package or device is missing."""
    package = {"int8": "torchao", "nf4": "bitsandbytes"}[quantize]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"model.quantize: {quantize} needs the package {package}, which is not installed; "
            "pip install 'marble-rl[quant]'"
        )
    if quantize == "nf4" and device.type != "cuda":
        raise InputError(f"model.quantize: nf4 needs a CUDA device, not {device.type}; use int8, or leave it out")


def adapter_of(index: Path) -> type[DiffusionModel]:
    """The model class for the pipeline with this model_index.json."""
    module, _, name = FAMILIES[_family(index, "model.path")].partition(":")
    adapter: type[DiffusionModel] = getattr(importlib.import_module(module), name)
    return adapter


def _check_safetensors(folder: Path, key: str) -> None:
    """Refuse weights that are pickles: what they are unpickled to depends on whoever wrote them."""
    for pickled in sorted(folder.glob("*/*pytorch_model*.bin")):
        if not any(pickled.parent.glob("*.safetensors")):
            raise InputError(
                f"{key}: {pickled} is a pickle, and there is no .safetensors beside it; only those are read. If you "
                "trust the file, open the folder with plain diffusers and write it again with save_pretrained"
            )


def _family(index: Path, key: str) -> str:
    try:
        tree = read_json(index)
        family = tree["_class_name"]
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(
            f"{key}: {index.parent} is not a diffusers pipeline (no readable model_index.json); "
            "give the folder that `pipeline.save_pretrained` wrote"
        ) from None
    if not isinstance(family, str) or family not in FAMILIES:
        why = ": it needs a picture to begin with" if str(family).endswith("ImageToVideoPipeline") else ""
        raise InputError(f"{key}: {family} is not supported{why}. Supported: {', '.join(FAMILIES)}")
    for part, entry in tree.items():
        # diffusers imports whatever library stands here; one in the current folder may be anyone's.
        if isinstance(entry, list) and (len(entry) != 2 or entry[0] not in LIBRARIES):
            raise InputError(
                f"{key}: {index} loads {shown(part)} from {shown(entry)}; expected a class of diffusers or "
                "transformers. Code of other libraries is not run"
            )
    return family
