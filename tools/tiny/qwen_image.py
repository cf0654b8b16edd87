"""A tiny Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.tiny.text import QWEN_WIDTH, qwen

CHANNELS = 4


def build_tiny_qwen_image(folder: Path, seed: int = 0) -> None:
    """A `QwenImagePipeline` with the scheduler settings of Qwen-Image; ask it for 16x16 images."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = QwenImagePipeline(None, None, None, None, None)
        text_encoder, tokenizer = qwen(pipeline.prompt_template_encode)
        pipeline.register_modules(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_image_seq_len=256,
                max_image_seq_len=8192,
                base_shift=0.5,
                max_shift=0.9,
                shift_terminal=0.02,
            ),
            vae=_vae(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
        )
        pipeline.save_pretrained(folder)


def _transformer() -> Any:
    from diffusers import QwenImageTransformer2DModel

    transformer = QwenImageTransformer2DModel(
        in_channels=4 * CHANNELS,
        out_channels=CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=QWEN_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    return transformer


def _vae() -> Any:
    """A random autoencoder of videos with factor 4 in space and 2 in time."""
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[-0.76, 0.11, -0.17, 0.97],
        latents_std=[2.82, 1.45, 2.33, 1.22],
    )
