"""A checkpoint of open_clip (https://github.com/mlfoundations/open_clip) as a `CLIPModel` of transformers.

The two libraries compute the same network under other names. open_clip keeps the three projections of attention in
one tensor, and its two last projections are matrices to multiply from the right:

    in_proj_weight [3 W, W]  ->  q_proj, k_proj, v_proj [W, W] each
    x @ proj [W, D]          ->  linear layer with weight [D, W]

Two things are not in the tensors. The number of attention heads follows from the width in every ViT among open_clip's
model configs: 64 wide each in the text tower; in the vision tower too, but never more than 16 of them (ViT-H/14 has
16 that are 80 wide). The activation is GELU: configs whose name ends in `quickgelu`
have another one, and are not supported.

The text is pooled at its end token, open_clip's way the highest number there is. Attention is causal, so what stands
behind that token, padding, changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.rewards.builtin.tensors import check_accounted, count_blocks, read_tensors, renamed, shape_of

ADVICE = "give a checkpoint of open_clip's CLIP with a ViT, or a folder in transformers' format"
WRAPPED = "module."
"""Before every name if the model was saved from inside DistributedDataParallel."""
HEAD_WIDTH = 64
MOST_VISION_HEADS = 16

TRANSPOSED = {"text_projection.weight": "text_projection", "visual_projection.weight": "visual.proj"}
FUSED = r"\.self_attn\.([qkv])_proj\."
NAMES = (
    (r"^text_model\.embeddings\.token_embedding\.", "token_embedding."),
    (r"^text_model\.embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_model\.final_layer_norm\.", "ln_final."),
    (r"^vision_model\.embeddings\.class_embedding$", "visual.class_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "visual.conv1."),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "visual.positional_embedding"),
    (r"^vision_model\.pre_layrnorm\.", "visual.ln_pre."),
    (r"^vision_model\.post_layernorm\.", "visual.ln_post."),
    (r"^text_model\.encoder\.layers\.", "transformer.resblocks."),
    (r"^vision_model\.encoder\.layers\.", "visual.transformer.resblocks."),
    (FUSED, ".attn.in_proj_"),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
    (r"\.layer_norm([12])\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
)
"""transformers' names of tensors, as patterns for `renamed`, and what open_clip has there."""


def read_model(file: Path, key: str) -> Any:
    """The `CLIPModel` of a checkpoint file, in float32 on the CPU."""
    stored = read_tensors(file, key, ADVICE)
    if stored and all(name.startswith(WRAPPED) for name in stored):
        stored = {name.removeprefix(WRAPPED): tensor for name, tensor in stored.items()}
    try:
        return to_transformers(stored)
    except InputError as error:
        raise InputError(f"{key}: {file}: {error}; {ADVICE}") from None


def to_transformers(stored: Mapping[str, Tensor]) -> Any:
    """The `CLIPModel` of open_clip's tensors. Every tensor on either side must be accounted for."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={**_text_sizes(stored), "hidden_act": "gelu"},
        vision_config={**_vision_sizes(stored), "hidden_act": "gelu"},
        projection_dim=shape_of(stored, "text_projection", 2)[1],
    )
    # On the meta device nothing is drawn at random only to be overwritten.
    with torch.device("meta"):
        model = CLIPModel(config)
    model.load_state_dict(_renamed(stored, model), assign=True)
    # The buffers that transformers keeps out of its state dict still have no values.
    for tower in (model.text_model, model.vision_model):
        tower.embeddings.position_ids = torch.arange(tower.embeddings.position_ids.shape[-1])[None]
    return model


def _text_sizes(stored: Mapping[str, Tensor]) -> dict[str, int]:
    vocabulary, width = shape_of(stored, "token_embedding.weight", 2)
    if width % HEAD_WIDTH:
        raise InputError(f"the text tower is {width} wide, which is no multiple of {HEAD_WIDTH}")
    return {
        **_tower_sizes(stored, "transformer.", width),
        "num_attention_heads": width // HEAD_WIDTH,
        "vocab_size": vocabulary,
        "max_position_embeddings": shape_of(stored, "positional_embedding", 2)[0],
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
    }


def _vision_sizes(stored: Mapping[str, Tensor]) -> dict[str, int]:
    width, _, _, patch = shape_of(stored, "visual.conv1.weight", 4)
    positions = shape_of(stored, "visual.positional_embedding", 2)[0]
    heads = min(width // HEAD_WIDTH, MOST_VISION_HEADS)
    if width % HEAD_WIDTH and (heads < MOST_VISION_HEADS or width % heads):
        raise InputError(f"the vision tower is {width} wide, and it is not known how many attention heads that makes")
    return {
        **_tower_sizes(stored, "visual.transformer.", width),
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": math.isqrt(positions - 1) * patch,
    }


def _tower_sizes(stored: Mapping[str, Tensor], prefix: str, width: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": shape_of(stored, f"{prefix}resblocks.0.mlp.c_fc.weight", 2)[0],
        "num_hidden_layers": count_blocks(stored, f"{prefix}resblocks."),
    }


def _renamed(stored: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """open_clip's tensors, taken apart, under transformers' names."""
    names = {name: TRANSPOSED.get(name) or renamed(name, NAMES) for name in model.state_dict()}
    shapes = {names[name]: _shape_there(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    check_accounted(stored, shapes, unused=())
    return {name: _part(name, stored[there]) for name, there in names.items()}


def _shape_there(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name in TRANSPOSED:
        return shape[::-1]
    return (3 * shape[0], *shape[1:]) if re.search(FUSED, name) else shape


def _part(name: str, tensor: Tensor) -> Tensor:
    if name in TRANSPOSED:
        return tensor.T.contiguous()
    fused = re.search(FUSED, name)
    return tensor.chunk(3)["qkv".index(fused[1])] if fused else tensor
