"""How programs other than diffusers read a LoRA file, written from their code and sharing none with the package.

ComfyUI (comfy/lora.py, comfy/weight_adapter/lora.py): it looks up every name that it knows. `lora_unet_` and
`diffusion_model.` before a layer of the model's own code are known for every model; `transformer.` before a layer of
diffusers for Stable Diffusion 3, FLUX.1 and Qwen-Image, not for Wan. The scale is alpha / rank where there is an alpha
tensor, otherwise 1. The header of the file is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Place = tuple[str, int]
"""A layer of the model's own code, and the first of its rows that is the layer of diffusers."""
FACTORS = ((".lora_up.weight", ".lora_down.weight"), (".lora_B.weight", ".lora_A.weight"))


def own_places(name: str, transformer: Any) -> dict[str, Place]:
    """Where each attention projection of diffusers is in the model's own code, as ComfyUI and kohya have it."""
    places: dict[str, Place] = {}
    width = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    queries = ["to_q", "to_k", "to_v"]
    added = ["add_q_proj", "add_k_proj", "add_v_proj"]
    if name in ("sd3", "flux"):
        image, text = {
            "sd3": ("joint_blocks.{}.x_block.attn", "joint_blocks.{}.context_block.attn"),
            "flux": ("double_blocks.{}.img_attn", "double_blocks.{}.txt_attn"),
        }[name]
        for i in range(len(transformer.transformer_blocks)):
            block = f"transformer_blocks.{i}.attn"
            for part in range(3):
                places[f"{block}.{queries[part]}"] = (f"{image}.qkv".format(i), part * width)
                places[f"{block}.{added[part]}"] = (f"{text}.qkv".format(i), part * width)
            places[f"{block}.to_out.0"] = (f"{image}.proj".format(i), 0)
            places[f"{block}.to_add_out"] = (f"{text}.proj".format(i), 0)
    if name == "flux":
        for i in range(len(transformer.single_transformer_blocks)):
            for part in range(3):
                own = f"single_blocks.{i}.linear1"
                places[f"single_transformer_blocks.{i}.attn.{queries[part]}"] = (own, part * width)
    if name == "qwen_image":
        for i in range(len(transformer.transformer_blocks)):
            for layer in [*queries, *added, "to_out.0", "to_add_out"]:
                places[f"transformer_blocks.{i}.attn.{layer}"] = (f"transformer_blocks.{i}.attn.{layer}", 0)
    if name == "wan":
        for i in range(len(transformer.blocks)):
            for own, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2")):
                for letter, layer in zip("qkvo", [*queries, "to_out.0"], strict=True):
                    places[f"blocks.{i}.{diffusers}.{layer}"] = (f"blocks.{i}.{own}.{letter}", 0)
    return places


def in_own_layers(deltas: dict[str, Tensor], places: dict[str, Place]) -> dict[str, Tensor]:
    """Changes of diffusers' weights, as changes of the weights of the model's own code."""
    own: dict[str, Tensor] = {}
    for layer, delta in deltas.items():
        name, start = places[layer]
        rows, inputs = delta.shape
        whole = own.setdefault(name, torch.zeros(_rows(name, inputs, rows), inputs))
        whole[start : start + rows] = delta
    return own


def _rows(own: str, inputs: int, rows: int) -> int:
    """`qkv` stacks three projections; FLUX.1's `linear1` also the four times wider input of its feed-forward part."""
    return 3 * inputs if own.endswith(".qkv") else 7 * inputs if own.endswith(".linear1") else rows


def read_by_comfyui(file: Path, name: str, places: dict[str, Place], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The changes of the model's weights; fails for a name that ComfyUI would skip. ``own``: tensors of their sizes."""
    tensors = load_file(file)
    known: dict[str, tuple[str, int]] = {}
    for layer in own:
        known[f"diffusion_model.{layer}"] = (layer, 0)
        known[f"lora_unet_{layer.replace('.', '_')}"] = (layer, 0)
    if name != "wan":
        known |= {f"transformer.{layer}": place for layer, place in places.items()}
    deltas = {layer: torch.zeros_like(weight) for layer, weight in own.items()}
    loaded: set[str] = set()
    for key, (layer, start) in known.items():
        alpha = tensors.get(f"{key}.alpha")
        for up, down in FACTORS:
            if key + up in tensors:
                scale = 1.0 if alpha is None else alpha.item() / len(tensors[key + down])
                change = scale * (tensors[key + up] @ tensors[key + down])
                deltas[layer][start : start + len(change)] += change
                loaded |= {key + up, key + down, *([] if alpha is None else [f"{key}.alpha"])}
    assert loaded == tensors.keys(), f"not loaded: {sorted(tensors.keys() - loaded)[:3]}"
    return deltas


def read_by_kohya(file: Path) -> dict[str, Tensor]:
    """Changes by the name of the module; unlike ComfyUI, kohya's scripts need alpha for every layer."""
    tensors = load_file(file)
    modules = {key.split(".")[0] for key in tensors}
    assert all(module.startswith("lora_unet_") for module in modules)
    deltas = {}
    for module in modules:
        down, up = tensors.pop(f"{module}.lora_down.weight"), tensors.pop(f"{module}.lora_up.weight")
        deltas[module.removeprefix("lora_unet_")] = tensors.pop(f"{module}.alpha").item() / len(down) * (up @ down)
    assert not tensors
    return deltas
