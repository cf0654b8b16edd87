"""A tiny Wan 2.1, and two Wan 2.2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.tiny.text import T5_WIDTH, t5

CHANNELS = 4
BOUNDARY = 0.875
"""Of Wan 2.2 T2V-A14B: 0.875 of the training timesteps."""


def build_tiny_wan(folder: Path, seed: int = 0) -> None:
    """A `WanPipeline` with the scheduler of Wan 2.1 for 480p; ask it for 16x16 videos of 5 frames."""
    _build(folder, seed, flow_shift=3.0)


def build_tiny_wan22_5b(folder: Path, seed: int = 0) -> None:
    """Like Wan 2.2 TI2V-5B: a timestep for every token, and an autoencoder that packs 2x2 pixels into channels."""
    packed = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 8}
    vae = {**packed, "is_residual": True, "decoder_base_dim": 12}
    _build(folder, seed, flow_shift=5.0, vae=vae, expand_timesteps=True)


def build_tiny_wan22_14b(folder: Path, seed: int = 0) -> None:
    """Like Wan 2.2 T2V-A14B: one transformer for high noise, one for low."""
    _build(folder, seed, flow_shift=3.0, transformers=2, boundary_ratio=BOUNDARY)


def _build(
    folder: Path,
    seed: int,
    flow_shift: float,
    vae: dict[str, Any] | None = None,
    transformers: int = 1,
    **settings: Any,
) -> None:
    """``settings``: of the pipeline itself."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder, tokenizer = t5(multilingual=True)
        names = ("transformer", "transformer_2")[:transformers]
        levels = {"use_flow_sigmas": True, "flow_shift": flow_shift}
        pipeline = WanPipeline(
            **{name: _transformer() for name in names},
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", **levels),
            vae=_vae(**(vae or {})),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            **settings,
        )
        pipeline.save_pretrained(folder)


def _transformer() -> Any:
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        ffn_dim=32,
        freq_dim=16,
        text_dim=T5_WIDTH,
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    return transformer


def _vae(**given: Any) -> Any:
    """A random autoencoder of videos with factor 4 in space and in time, unless other settings are ``given``."""
    from diffusers import AutoencoderKLWan

    settings = {
        "base_dim": 8,
        "z_dim": CHANNELS,
        "dim_mult": [1, 2, 2],
        "num_res_blocks": 1,
        "temperal_downsample": [True, True],
        "latents_mean": [-0.76, 0.11, -0.17, 0.97],
        "latents_std": [2.82, 1.45, 2.33, 1.22],
        "scale_factor_temporal": 4,
        "scale_factor_spatial": 4,
    }
    return AutoencoderKLWan(**settings | given)
