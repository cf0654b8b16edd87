"""Configs of published pipelines: enough to estimate their memory without access to the hub.

    python -m tools.published sd3.5-medium build/sd3.5-medium
    marble config show my.yaml --set model.path=build/sd3.5-medium --on cuda

Only the settings that determine the shapes of the parts are here: no weights, no tokenizers, no settings of the
schedulers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from marble_rl.errors import InputError

Part = tuple[str, str, dict[str, Any]]
"""Library, class, config"""


def _clip(kind: str, width: int, layers: int, heads: int) -> Part:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "projection_dim": width}
    return "transformers", kind, {**sizes, "num_hidden_layers": layers, "num_attention_heads": heads}


def _t5(kind: str, words: int) -> Part:
    sizes = {"vocab_size": words, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    return "transformers", kind, {**sizes, "feed_forward_proj": "gated-gelu"}


_QWEN_VL: Part = (
    "transformers",
    "Qwen2_5_VLForConditionalGeneration",
    {
        "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
    },
)
_VAE: Part = (
    "diffusers",
    "AutoencoderKL",
    {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "latent_channels": 16,
        "sample_size": 1024,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.1,  # any value: it changes no shape
    },
)
_EULER: Part = ("diffusers", "FlowMatchEulerDiscreteScheduler", {})
_UNIPC: Part = ("diffusers", "UniPCMultistepScheduler", {"use_flow_sigmas": True})
_SD35_MEDIUM = {
    "sample_size": 128,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 384,
    "dual_attention_layers": list(range(13)),
    "qk_norm": "rms_norm",
}
_FLUX_DEV = {
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}
_QWEN_IMAGE = {"num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584}


_WAN22_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,  # any values: they change no shape
    "latents_std": [1.0] * 48,
}


def _wan(
    heads: int,
    layers: int,
    inner: int,
    channels: int = 16,
    vae: dict[str, Any] | None = None,
    names: tuple[str, ...] = ("transformer",),
) -> dict[str, Part]:
    sizes = {"num_attention_heads": heads, "attention_head_dim": 128, "num_layers": layers, "ffn_dim": inner}
    transformer = {**sizes, "in_channels": channels, "out_channels": channels}
    return {
        **dict.fromkeys(names, ("diffusers", "WanTransformer3DModel", transformer)),
        "vae": ("diffusers", "AutoencoderKLWan", vae or {}),
        "text_encoder": _t5("UMT5EncoderModel", 256384),
        "scheduler": _UNIPC,
    }


PUBLISHED: dict[str, tuple[str, dict[str, Part]]] = {
    "sd3.5-medium": (
        "StableDiffusion3Pipeline",
        {
            "transformer": ("diffusers", "SD3Transformer2DModel", _SD35_MEDIUM),
            "vae": _VAE,
            "text_encoder": _clip("CLIPTextModelWithProjection", 768, 12, 12),
            "text_encoder_2": _clip("CLIPTextModelWithProjection", 1280, 32, 20),
            "text_encoder_3": _t5("T5EncoderModel", 32128),
            "scheduler": _EULER,
        },
    ),
    "flux.1-dev": (
        "FluxPipeline",
        {
            "transformer": ("diffusers", "FluxTransformer2DModel", _FLUX_DEV),
            "vae": _VAE,
            "text_encoder": _clip("CLIPTextModel", 768, 12, 12),
            "text_encoder_2": _t5("T5EncoderModel", 32128),
            "scheduler": _EULER,
        },
    ),
    "qwen-image": (
        "QwenImagePipeline",
        {
            "transformer": ("diffusers", "QwenImageTransformer2DModel", _QWEN_IMAGE),
            "vae": ("diffusers", "AutoencoderKLQwenImage", {}),
            "text_encoder": _QWEN_VL,
            "scheduler": _EULER,
        },
    ),
    "wan2.1-1.3b": ("WanPipeline", _wan(heads=12, layers=30, inner=8960)),
    "wan2.1-14b": ("WanPipeline", _wan(heads=40, layers=40, inner=13824)),
    "wan2.2-ti2v-5b": ("WanPipeline", _wan(heads=24, layers=30, inner=14336, channels=48, vae=_WAN22_VAE)),
    "wan2.2-t2v-a14b": (
        "WanPipeline",
        _wan(heads=40, layers=40, inner=13824, names=("transformer", "transformer_2")),
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "wan2.2-ti2v-5b": {"expand_timesteps": True},
    "wan2.2-t2v-a14b": {"boundary_ratio": 0.875},
}
"""Of a pipeline itself, beside those of its parts"""


def write_published(name: str, folder: Path) -> None:
    """Write the configs of a pipeline to a folder in diffusers' format."""
    if name not in PUBLISHED:
        raise InputError(f"unknown pipeline {name!r}; use one of {', '.join(PUBLISHED)}")
    pipeline, parts = PUBLISHED[name]
    index: dict[str, Any] = {"_class_name": pipeline, **SETTINGS.get(name, {})}
    for part, (library, kind, config) in parts.items():
        index[part] = [library, kind]
        index |= {part.replace("text_encoder", "tokenizer"): [library, "tokenizer"]} if "text_" in part else {}
        file = folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(config | ({"_class_name": kind} if library == "diffusers" else {})))
    (folder / "model_index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m tools.published NAME FOLDER\nNAME: {', '.join(PUBLISHED)}")
    write_published(sys.argv[1], Path(sys.argv[2]))
