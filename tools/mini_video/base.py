"""The mini video pipeline's transformer and text encoder, trained together by flow matching on captioned latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tools.mini.base import Captioned
from tools.mini.tokenizers import t5_tokenizer, token_ids
from tools.mini.tokenizers import words as words_of_pictures
from tools.mini_video.autoencoder import LATENT_CHANNELS
from tools.mini_video.scenes import CAMERA, DIRECTIONS, VERBS

TEXT_LENGTH = 18
"""Tokens that the text encoder gets; no caption of the world is longer."""
WIDTH = 96
LAYERS = 6
MOTIONS = ("rolls moves slowly fast to the stops falls bounces meet part camera up down in out",)


class VideoBase(Captioned):
    """The parts of the pipeline that are trained on captions: UMT5 and Wan's transformer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokenizer = t5_tokenizer(TEXT_LENGTH, words())
            self.text_encoder = _text_encoder(len(self.tokenizer))
            self.transformer = _transformer()

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """[B, TEXT_LENGTH]"""
        return token_ids(self.tokenizer, captions, TEXT_LENGTH)

    def velocity(self, x: Tensor, sigma: Tensor, tokens: Tensor) -> Tensor:
        """As in the pipeline: states of the text, zero after its last token."""
        mask = tokens != self.tokenizer.pad_token_id
        states = self.text_encoder(tokens, attention_mask=mask).last_hidden_state * mask[:, :, None]
        prediction: Tensor = self.transformer(
            hidden_states=x, timestep=sigma * 1000, encoder_hidden_states=states, return_dict=False
        )[0]
        return prediction


def words() -> list[str]:
    """Every word that a caption can hold, in a fixed order."""
    phrases = [*words_of_pictures(), *MOTIONS, *CAMERA, *DIRECTIONS, *VERBS, *(f"{verb}s" for verb in VERBS)]
    return list(dict.fromkeys(word for phrase in phrases for word in phrase.split()))


def _text_encoder(vocabulary: int) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=vocabulary, d_model=WIDTH, d_kv=24, d_ff=2 * WIDTH, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return UMT5EncoderModel(config)


def _transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 1, 1),
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        num_attention_heads=WIDTH // 32,
        attention_head_dim=32,
        ffn_dim=4 * WIDTH,
        freq_dim=64,
        text_dim=WIDTH,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
