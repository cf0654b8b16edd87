"""Stable Diffusion 3 and 3.5, and any pipeline saved as `StableDiffusion3Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.models.base import JOINT_ATTENTION, DiffusionModel, Geometry
from marble_rl.models.pixels import decoded, to_uint8
from marble_rl.types import Conditioning


@dataclass(frozen=True)
class SD3Conditioning(Conditioning):
    prompt_embeds: Tensor
    """[B, L, D]"""
    pooled: Tensor
    """[B, D']"""


class SD3Model(DiffusionModel):
    name = "Stable Diffusion 3"
    pipeline_class = "StableDiffusion3Pipeline"
    text_parts = ("text_encoder", "text_encoder_2", "text_encoder_3")
    text_tokenizer = "tokenizer_3"
    default_text = 256
    most_text = 512
    lora_targets = JOINT_ATTENTION

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> SD3Conditioning:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self._text_length,
        )
        return SD3Conditioning(embeds, pooled)

    def blank_conditioning(self, rows: int) -> SD3Conditioning:
        """The tokens of CLIP come before those of T5."""
        config, tokens = self.transformer.config, self.pipeline.tokenizer_max_length + self._text_length
        return SD3Conditioning(
            torch.zeros(rows, tokens, config.joint_attention_dim), torch.zeros(rows, config.pooled_projection_dim)
        )

    @property
    def geometry(self) -> Geometry:
        config, scale = self.transformer.config, self.pipeline.vae_scale_factor
        own = self.pipeline.default_sample_size * scale
        return Geometry(config.in_channels, scale, config.patch_size, own, own)

    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        return self.scheduler_sigmas(num_inference_steps=steps, **self.dynamic_shift(latent_shape))

    def predict(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, SD3Conditioning)
        # Not rounded to an integer, so that sampling and training see the same timestep.
        timestep = sigma * self.pipeline.scheduler.config.num_train_timesteps
        prediction: Tensor = self.transformer(
            hidden_states=x,
            timestep=timestep,
            encoder_hidden_states=conditioning.prompt_embeds,
            pooled_projections=conditioning.pooled,
            return_dict=False,
        )[0]
        return prediction

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return to_uint8(decoded(vae, latents / vae.config.scaling_factor + vae.config.shift_factor))
