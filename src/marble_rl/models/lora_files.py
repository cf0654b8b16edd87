"""LoRA files in diffusers' own format: one safetensors, `transformer.<layer>.lora_A.weight` and `...lora_B.weight`.

A model with two transformers has a file for each, `..._high_noise.safetensors` and `..._low_noise.safetensors`: plain
diffusers loads LoRAs of one transformer at a time.

The header holds rank, alpha and layers, so a file that does not fit is refused before a model is loaded. Without
adapter metadata in the header, alpha is the rank, as in plain diffusers.

marble writes alpha = rank and puts the scale, alpha / rank, into B: programs other than diffusers do not read the
header. Files with another alpha, of older versions and of others, are read as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models.settings import LoraConfig
from marble_rl.section import shown
from marble_rl.storage import parse_json

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig

LORA_FILE = "pytorch_lora_weights.safetensors"
PARTS = ("", "high_noise", "low_noise")
"""Of a transformer, that a LoRA file may be for (models/experts.py)"""
METADATA = "lora_adapter_metadata"
"""Key in the file's header under which diffusers stores the adapter's config."""
PREFIX = "transformer."
MOST_ALPHA = 1e9
KINDS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class LoraFile:
    """The header of a LoRA file."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    """By parameter, as the transformer names it: `blocks.0.attn.to_q.lora_A.weight`"""
    rank: int
    alpha: float

    def tensors(self) -> dict[str, Tensor]:
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(PREFIX + name) for name in self.shapes}


def lora_name(part: str) -> str:
    """Name of the file with the LoRA of a part of the transformer."""
    return LORA_FILE.replace(".", f"_{part}.") if part else LORA_FILE


LORA_FILES = tuple(lora_name(part) for part in PARTS)


def check_initial_lora(config: LoraConfig, parts: Sequence[str] = PARTS) -> dict[str, LoraFile]:
    """The LoRA that ``lora.init`` names, if any, by part; refused if its rank differs from the config's."""
    located = {} if config.init is None else locate_parts(config.init, "lora.init", parts)
    files = {part: read_lora_file(file, "lora.init") for part, file in located.items()}
    for file in files.values():
        if file.rank != config.rank:
            raise InputError(
                f"lora.init: {file.path} has rank {file.rank}, but lora.rank is {config.rank}; set lora.rank: "
                f"{file.rank}"
            )
    return files


def initial_tensors(
    files: Mapping[str, LoraFile], parts: Iterable[str], own: Mapping[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """The tensors of a LoRA for the trained parameters ``own`` of these ``parts``, which have ``alpha`` and the LoRA's
    rank."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        if part not in files:
            found = next(iter(files.values())).path
            raise InputError(
                f"lora.init: beside {found} there is no {lora_name(part)}; give a folder with both, or set "
                "lora.experts to the one that it adapts"
            )
        prefix = f"{part}." if part else ""
        mine = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        tensors |= {prefix + name: value for name, value in _initial(files[part], mine, alpha).items()}
    return tensors


def _initial(file: LoraFile, own: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """The tensors of one file.

    Refused unless layers and shapes are the same.
    """
    advice = "give the LoRA of this model, or set lora.targets to the layers that it adapts"
    for name, shape in file.shapes.items():
        if name not in own or shape != tuple(own[name].shape):
            what = "which is not trained here" if name not in own else "which has another size here"
            raise InputError(f"lora.init: {_other_model(file.path, name)}, {what}; {advice}")
    for name in own:
        if name not in file.shapes:
            raise InputError(
                f"lora.init: {file.path} is a LoRA of another model, or of other layers: it has no {layer_of(name)}; "
                f"{advice}"
            )
    return folded(file.tensors(), file.alpha / alpha)


def folded(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The tensors of a LoRA with ``scale`` in its B, so that the product B A has it.

    A power of two changes exponents only, and dividing by it later gives the same bits again. Any other scale rounds
    each number of B once, by at most 6e-8 of it (float32).
    """
    return {name: value.float() * scale if name.endswith(KINDS[1]) else value for name, value in tensors.items()}


def check_layers(file: Path, weights: Mapping[str, Tensor], key: str) -> None:
    """Refuse a LoRA whose layers are not those of the transformer with these ``weights``.

    Layers in other formats are not checked: diffusers converts many of them.
    """
    shapes, _ = _header(file, key)
    for name, shape in shapes.items():
        if not _is_plain(name) or len(shape) != 2:
            continue
        weight = weights.get(f"{layer_of(name)}.weight")
        side = 1 if name.endswith(KINDS[0]) else 0  # A is [rank, inputs], B is [outputs, rank]
        if weight is None or weight.shape[side] != shape[side]:
            what = "which this one does not have" if weight is None else "which has another size here"
            raise InputError(f"{key}: {_other_model(file, name)}, {what}; give the model that it was trained on")


def read_lora_file(path: Path, key: str) -> LoraFile:
    """Read the header of a LoRA with one rank and one alpha."""
    file = locate(path, key)
    shapes, config = _header(file, key)
    foreign = [name for name in shapes if not _is_plain(name)]
    if foreign or not shapes:
        why = f"it holds {foreign[0]!r}" if foreign else "it is empty"
        raise InputError(
            f"{key}: {file} is not a plain LoRA of a transformer in diffusers' format ({why}); "
            "docs/exporting.md says how to convert others"
        )
    for name, shape in shapes.items():
        if len(shape) != 2:
            raise InputError(f"{key}: {file} holds {name!r} of shape {list(shape)}; expected matrices")
    ranks = {shape[0] for name, shape in shapes.items() if name.endswith(KINDS[0])}
    unequal = [name for name in ("rank_pattern", "alpha_pattern", "use_dora", "use_rslora") if config.get(name)]
    if len(ranks) != 1 or unequal:
        what = unequal[0] if unequal else f"ranks {sorted(ranks)}"
        raise InputError(f"{key}: {file} has {what}; expected one rank and one alpha for all layers")
    (rank,) = ranks
    plain = {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}
    return LoraFile(file, plain, rank, float(config.get("lora_alpha", rank)))


def _header(file: Path, key: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Shapes by name, and the transformer's part of the adapter metadata."""
    try:
        with safe_open(file, "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            text = (opened.metadata() or {}).get(METADATA, "{}")
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{key}: {file} cannot be read as safetensors ({error}); give a LoRA file") from None
    try:
        config = parse_json(text)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
        own = {k.removeprefix(PREFIX): value for k, value in config.items() if k.startswith(PREFIX)}
        alpha = own.get("lora_alpha", 1)
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < MOST_ALPHA:
            raise ValueError(f"lora_alpha is {shown(alpha)}")
    except ValueError as error:
        raise InputError(
            f"{key}: the {METADATA} in the header of {file} cannot be read ({error}); save the LoRA again with "
            "diffusers' save_lora_weights"
        ) from None
    return shapes, own


def locate(path: Path, key: str) -> Path:
    """The LoRA file at a path: the file itself, or the one in the folder."""
    if path.is_dir():
        if (path / LORA_FILE).is_file():
            return path / LORA_FILE
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return files[0]
        inside = f"; did you mean {path / 'lora'}?" if holds_lora(path / "lora") else ""
        raise InputError(
            f"{key}: {path} holds {len(files)} .safetensors files and no {LORA_FILE}{inside or '; name one'}"
        )
    if not path.is_file():
        raise InputError(f"{key}: no such file or folder: {path}. Give a LoRA that diffusers' save_lora_weights wrote")
    return path


def holds_lora(folder: Path) -> bool:
    """Whether it is a folder with a LoRA by the names that marble gives them."""
    return any((folder / name).is_file() for name in LORA_FILES)


def locate_parts(path: Path, key: str, parts: Sequence[str] = PARTS) -> dict[str, Path]:
    """The LoRA files at a path, by the part of the transformer that they are for.

    A file that is not named after a part is for the first one, as in plain diffusers.
    """
    found = {part: path / lora_name(part) for part in parts if (path / lora_name(part)).is_file()}
    if found:
        return found
    file = locate(path, key)
    named = [part for part in parts if part and file.stem.endswith(part)]
    return {named[0] if named else parts[0]: file}


def _is_plain(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith(KINDS)


def _other_model(file: Path, name: str) -> str:
    return f"{file} is a LoRA of another model: it adapts the layer {layer_of(name)}"


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to, as the transformer names it."""
    return name.removeprefix(PREFIX).removesuffix(KINDS[0]).removesuffix(KINDS[1])


def lora_metadata(config: PeftLoraConfig) -> dict[str, str]:
    """Header of a LoRA file whose B holds the scale. Some versions of diffusers guess alpha without it.

    It holds only the keys that `LoraPolicy` sets: diffusers passes all of them to the reader's peft, and an older peft
    fails on keys that it does not know. Settings of the initialisation are not needed to read the weights.
    """
    kept = {"r": config.r, "lora_alpha": config.r, "target_modules": sorted(config.target_modules)}
    prefixed = {f"transformer.{key}": value for key, value in kept.items()}
    return {"format": "pt", METADATA: json.dumps(prefixed, indent=2, sort_keys=True)}
