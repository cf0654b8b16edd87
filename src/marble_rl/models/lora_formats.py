"""LoRA files for programs that use other names than diffusers: those of the models' original code.

The names are those that the readers look up: ComfyUI (comfy/lora.py, comfy/utils.py), kohya's sd-scripts
(networks/lora_sd3.py, lora_flux.py) and musubi-tuner (networks/lora_qwen_image.py, lora_wan.py). A layer that is not in
the tables below is refused: a reader skips names that it does not know, and the picture would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models.lora_files import KINDS, PREFIX, folded, layer_of, lora_metadata
from marble_rl.storage import save_safetensors

LoraFormat = Literal["diffusers", "comfyui", "kohya"]
BLOCK = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class Original:
    """The layers of a model in its original code."""

    layers: Mapping[str, tuple[str, ...]]
    """By their name, the layers of diffusers whose outputs they stack, in this order; # is the number of the block."""
    comfyui_knows_diffusers: bool = True
    """Whether ComfyUI also finds the layers by the names of diffusers."""


def _attention(original: str, diffusers: str, added: str = "") -> dict[str, tuple[str, ...]]:
    """Query, key and value in one layer, and the output; ``added``: of the text in joint attention."""
    queries = [f"{diffusers}.{f'add_{name}_proj' if added else f'to_{name}'}" for name in "qkv"]
    return {f"{original}.qkv": tuple(queries), f"{original}.proj": (f"{diffusers}.{added or 'to_out.0'}",)}


SD3 = Original(
    {
        **_attention("joint_blocks.#.x_block.attn", "transformer_blocks.#.attn"),
        **_attention("joint_blocks.#.x_block.attn2", "transformer_blocks.#.attn2"),
        **_attention("joint_blocks.#.context_block.attn", "transformer_blocks.#.attn", "to_add_out"),
        "joint_blocks.#.x_block.mlp.fc1": ("transformer_blocks.#.ff.net.0.proj",),
        "joint_blocks.#.x_block.mlp.fc2": ("transformer_blocks.#.ff.net.2",),
        "joint_blocks.#.context_block.mlp.fc1": ("transformer_blocks.#.ff_context.net.0.proj",),
        "joint_blocks.#.context_block.mlp.fc2": ("transformer_blocks.#.ff_context.net.2",),
    }
)
FLUX = Original(
    {
        **_attention("double_blocks.#.img_attn", "transformer_blocks.#.attn"),
        **_attention("double_blocks.#.txt_attn", "transformer_blocks.#.attn", "to_add_out"),
        "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.net.0.proj",),
        "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.net.2",),
        "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.net.0.proj",),
        "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.net.2",),
        "single_blocks.#.linear1": (
            *(f"single_transformer_blocks.#.attn.to_{name}" for name in "qkv"),
            "single_transformer_blocks.#.proj_mlp",
        ),
        "single_blocks.#.linear2": ("single_transformer_blocks.#.proj_out",),
    }
)
QWEN_IMAGE = Original(
    {
        f"transformer_blocks.#.{name}": (f"transformer_blocks.#.{name}",)  # the names of diffusers
        for name in (
            *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
            *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
            *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        )
    }
)
WAN = Original(
    {
        **{
            f"blocks.#.{original}.{name}": (f"blocks.#.{diffusers}.{layer}",)
            for original, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
            for name, layer in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
        },
        "blocks.#.ffn.0": ("blocks.#.ffn.net.0.proj",),
        "blocks.#.ffn.2": ("blocks.#.ffn.net.2",),
    },
    comfyui_knows_diffusers=False,
)
ORIGINALS = {
    "StableDiffusion3Pipeline": SD3,
    "FluxPipeline": FLUX,
    "QwenImagePipeline": QWEN_IMAGE,
    "WanPipeline": WAN,
}
"""By diffusers' pipeline class. A family that is not here can be written for diffusers only."""


def write_lora(file: Path, transformer: Any, adapter: str, pipeline: str, layout: LoraFormat) -> None:
    """Write an adapter of a transformer of diffusers, with alpha / rank in its B; ``pipeline`` is diffusers' class."""
    from peft import get_peft_model_state_dict

    config = transformer.peft_config[adapter]
    tensors = folded(get_peft_model_state_dict(transformer, adapter_name=adapter), config.lora_alpha / config.r)
    original = ORIGINALS.get(pipeline)
    if layout != "diffusers" and original is None:
        raise InputError(f"--format: {layout!r} is not known for a {pipeline}; use --format diffusers")
    if original is None or layout == "diffusers" or (layout == "comfyui" and original.comfyui_knows_diffusers):
        named, header = {PREFIX + name: value for name, value in tensors.items()}, lora_metadata(config)
    else:
        pairs = _in_original_layers(tensors, original.layers, transformer, layout)
        named, header = (_for_kohya if layout == "kohya" else _for_comfyui)(pairs), {"format": "pt"}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_safetensors(file, named, header)


def _for_comfyui(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Without alpha, ComfyUI takes the scale 1."""
    kinds = {kind: i for i, kind in enumerate(KINDS)}
    return {f"diffusion_model.{layer}{kind}": pair[i] for layer, pair in pairs.items() for kind, i in kinds.items()}


def _for_kohya(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """kohya's scripts need alpha; it is the rank of the layer, which is several times the trained one if it stacks."""
    named: dict[str, Tensor] = {}
    for layer, (down, up) in pairs.items():
        name = f"lora_unet_{layer.replace('.', '_')}"
        named |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        named[f"{name}.alpha"] = torch.tensor(float(len(down)))
    return named


def _in_original_layers(
    tensors: Mapping[str, Tensor], layers: Mapping[str, tuple[str, ...]], transformer: Any, layout: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by layer of the original code. Where that stacks several layers, A is stacked too, and B has their Bs on
    its diagonal, with rows of zeros for a layer that is not adapted."""
    original = {part: name for name, parts in layers.items() for part in parts}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for layer in sorted({layer_of(name) for name in tensors}):
        found = BLOCK.search(layer)
        number = found[1] if found else ""
        pattern = BLOCK.sub("blocks.#.", layer, count=1)
        if pattern not in original:
            raise InputError(
                f"--format: {layout!r} has no name for {layer}, which lora.targets adapts; use --format diffusers"
            )
        stack = original[pattern]
        if stack.replace("#", number) in pairs:
            continue
        down, up = [], []
        for part in (part.replace("#", number) for part in layers[stack]):
            if part + KINDS[0] in tensors:
                down.append(tensors[part + KINDS[0]])
                up.append(tensors[part + KINDS[1]])
            else:
                up.append(tensors[layer + KINDS[0]].new_zeros(transformer.get_submodule(part).out_features, 0))
        pairs[stack.replace("#", number)] = torch.cat(down), torch.block_diag(*up)
    return pairs
