"""A tiny Wan 2.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.tiny.text import T5_WIDTH, t5

CHANNELS = 4


def build_tiny_wan(folder: Path, seed: int = 0) -> None:
    """A `WanPipeline` with the scheduler of Wan 2.1 for 480p; ask it for 16x16 videos of 5 frames."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder, tokenizer = t5(multilingual=True)
        pipeline = WanPipeline(
            transformer=_transformer(),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            vae=_vae(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
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


def _vae() -> Any:
    """A random autoencoder of videos with factor 4 in space and in time."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[-0.76, 0.11, -0.17, 0.97],
        latents_std=[2.82, 1.45, 2.33, 1.22],
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
