"""Tiny pipelines with random weights, in diffusers' real folder format: for tests and for trying things out.

python -m marble_rl.models.tiny build/tiny-sd3
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

LETTERS = [chr(c) for c in range(33, 127)]
"""Printable ASCII: the tokenizers spell."""
TEXT_LENGTH = 24


def build_tiny_sd3(folder: Path, seed: int = 0, image_size: int = 16) -> None:
    """A `StableDiffusion3Pipeline` with all nine components, about 0.1 M parameters, 16x16 images.

    The same seed gives the same weights.
    """
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        T5Config,
        T5EncoderModel,
        T5Tokenizer,
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_vocab = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
        clip_tokenizer = CLIPTokenizer(
            vocab={token: i for i, token in enumerate(clip_vocab)}, merges=[], model_max_length=TEXT_LENGTH
        )
        t5_tokenizer = T5Tokenizer(
            vocab=[
                ("<pad>", 0.0),
                ("</s>", 0.0),
                ("<unk>", 0.0),
                ("▁", -2.0),
                *((letter, -3.0) for letter in LETTERS),
            ],
            extra_ids=0,
            model_max_length=TEXT_LENGTH,
        )
        clip_config = CLIPTextConfig(
            vocab_size=len(clip_vocab),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            projection_dim=16,
            max_position_embeddings=TEXT_LENGTH,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        t5_config = T5Config(
            vocab_size=len(t5_tokenizer),
            d_model=32,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        )
        transformer = SD3Transformer2DModel(
            sample_size=image_size // 2,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=image_size // 2,
            qk_norm="rms_norm",
        )
        # Freshly built transformers end in a layer of zeros: give it weights, or every velocity would be 0.
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
        vae = AutoencoderKL(
            in_channels=3,
            out_channels=3,
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
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=vae,
            text_encoder=CLIPTextModelWithProjection(clip_config),
            tokenizer=clip_tokenizer,
            text_encoder_2=CLIPTextModelWithProjection(clip_config),
            tokenizer_2=clip_tokenizer,
            text_encoder_3=T5EncoderModel(t5_config),
            tokenizer_3=t5_tokenizer,
        )
        pipeline.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m marble_rl.models.tiny FOLDER")
    build_tiny_sd3(Path(sys.argv[1]))
    print(f"wrote a tiny random Stable Diffusion 3 pipeline to {sys.argv[1]}")
