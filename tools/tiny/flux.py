"""A tiny FLUX.1-dev."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.tiny.sd3 import tiny_vae
from tools.tiny.text import CLIP_WIDTH, T5_WIDTH, clip, t5


def build_tiny_flux(folder: Path, seed: int = 0, image_size: int = 16, guidance_embeds: bool = True) -> None:
    """A `FluxPipeline` with the scheduler settings of FLUX.1-dev; ask it for 16x16 images."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_1, t5_2 = clip(projection=False), t5()
        pipeline = FluxPipeline(
            transformer=_transformer(guidance_embeds),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=tiny_vae(image_size),
            text_encoder=clip_1[0],
            tokenizer=clip_1[1],
            text_encoder_2=t5_2[0],
            tokenizer_2=t5_2[1],
        )
        pipeline.save_pretrained(folder)


def _transformer(guidance_embeds: bool) -> Any:
    from diffusers import FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=4 * 4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    return transformer
