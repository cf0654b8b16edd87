"""Tiny pipelines with random weights, in diffusers' real folder format: for tests and for trying things out.

python -m marble_rl.models.tiny build/tiny-sd3
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

LETTERS = [chr(c) for c in range(33, 127)]
"""Printable ASCII: the tokenizers spell."""
TEXT_LENGTH = 24
CLIP_WIDTH, T5_WIDTH = 16, 32


def build_tiny_sd3(folder: Path, seed: int = 0, image_size: int = 16) -> None:
    """A `StableDiffusion3Pipeline` with all nine components, 16x16 images. The same seed gives the same weights."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip, clip_2 = _clip(), _clip()
        t5 = _t5()
        pipeline = StableDiffusion3Pipeline(
            transformer=_sd3_transformer(image_size // 2),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny_vae(image_size),
            text_encoder=clip[0],
            tokenizer=clip[1],
            text_encoder_2=clip_2[0],
            tokenizer_2=clip_2[1],
            text_encoder_3=t5[0],
            tokenizer_3=t5[1],
        )
        pipeline.save_pretrained(folder)


def _clip() -> tuple[Any, Any]:
    """CLIP text encoder and its tokenizer."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    vocab = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    tokenizer = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocab)}, merges=[], model_max_length=TEXT_LENGTH
    )
    config = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=CLIP_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config), tokenizer


def _t5() -> tuple[Any, Any]:
    """T5 encoder and its tokenizer."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    tokenizer = T5Tokenizer(
        vocab=[*special, *((letter, -3.0) for letter in LETTERS)], extra_ids=0, model_max_length=TEXT_LENGTH
    )
    config = T5Config(vocab_size=len(tokenizer), d_model=T5_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return T5EncoderModel(config), tokenizer


def _sd3_transformer(latent_size: int) -> Any:
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
    # Freshly built transformers end in a layer of zeros: give it weights, or every velocity would be 0.
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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m marble_rl.models.tiny FOLDER")
    build_tiny_sd3(Path(sys.argv[1]))
    print(f"wrote a tiny random Stable Diffusion 3 pipeline to {sys.argv[1]}")
