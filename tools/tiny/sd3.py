"""A tiny Stable Diffusion 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.tiny.text import CLIP_WIDTH, T5_WIDTH, clip, t5


def build_tiny_sd3(folder: Path, seed: int = 0, image_size: int = 16) -> None:
    """A `StableDiffusion3Pipeline` with all nine components, 16x16 images."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_1, clip_2 = clip(), clip()
        t5_3 = t5()
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(image_size // 2),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_vae(image_size),
            text_encoder=clip_1[0],
            tokenizer=clip_1[1],
            text_encoder_2=clip_2[0],
            tokenizer_2=clip_2[1],
            text_encoder_3=t5_3[0],
            tokenizer_3=t5_3[1],
        )
        pipeline.save_pretrained(folder)


def _transformer(latent_size: int) -> Any:
    from diffusers import SD3Transformer2DModel

    transformer = SD3Transformer2DModel(
        sample_size=latent_size,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=latent_size,
        qk_norm="rms_norm",
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    return transformer


def tiny_vae(image_size: int) -> Any:
    """A random autoencoder with factor 2 and 4 channels."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=image_size,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
