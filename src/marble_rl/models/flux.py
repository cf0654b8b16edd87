"""FLUX.1, and any pipeline saved as `FluxPipeline`.

A guidance scale is an input of FLUX.1-dev, which was distilled to follow it in one pass. Sampling and training use the
same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models.base import JOINT_ATTENTION, DiffusionModel, Geometry
from marble_rl.models.packing import PATCH, pack, unpack
from marble_rl.models.pixels import decoded, to_uint8
from marble_rl.types import Conditioning

GUIDANCE = 3.5
"""diffusers' default."""


@dataclass(frozen=True)
class FluxConditioning(Conditioning):
    prompt_embeds: Tensor
    """[B, L, D] of T5"""
    pooled: Tensor
    """[B, D'] of CLIP"""


class FluxModel(DiffusionModel):
    name = "FLUX.1"
    pipeline_class = "FluxPipeline"
    takes_guidance = True
    text_parts = ("text_encoder", "text_encoder_2")
    text_tokenizer = "tokenizer_2"
    default_text = 512
    most_text = 512
    lora_targets = JOINT_ATTENTION

    def __init__(
        self, pipeline: Any, device: torch.device, text_length: int | None = None, guidance: float | None = None
    ) -> None:
        super().__init__(pipeline, device, text_length, guidance)
        if not self.transformer.config.guidance_embeds:
            if guidance is not None:
                raise InputError(
                    f"model.guidance: {guidance} given, but this FLUX.1 was not distilled to follow one (schnell); "
                    "leave it out"
                )
        elif guidance is None:
            self.guidance = GUIDANCE

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> FluxConditioning:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=list(texts), device=self.device, max_sequence_length=self._text_length
        )
        return FluxConditioning(embeds, pooled)

    def blank_conditioning(self, rows: int) -> FluxConditioning:
        config = self.transformer.config
        return FluxConditioning(
            torch.zeros(rows, self._text_length, config.joint_attention_dim),
            torch.zeros(rows, config.pooled_projection_dim),
        )

    @property
    def geometry(self) -> Geometry:
        scale = self.pipeline.vae_scale_factor
        own = self.pipeline.default_sample_size * scale
        return Geometry(self.transformer.config.in_channels // PATCH**2, scale, PATCH, own, own)

    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        return self.scheduler_sigmas(sigmas=np.linspace(1.0, 1 / steps, steps), **self.dynamic_shift(latent_shape))

    def predict(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, FluxConditioning)
        height, width = x.shape[-2:]
        prediction = self.transformer(
            hidden_states=pack(x),
            timestep=sigma,  # the transformer multiplies by 1000
            guidance=None if self.guidance is None else torch.full_like(sigma, self.guidance),
            pooled_projections=conditioning.pooled,
            encoder_hidden_states=conditioning.prompt_embeds,
            txt_ids=torch.zeros(conditioning.prompt_embeds.shape[1], 3, device=x.device),
            img_ids=_positions(height // PATCH, width // PATCH, x.device),
            return_dict=False,
        )[0]
        return unpack(prediction, height, width)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return to_uint8(decoded(vae, latents / vae.config.scaling_factor + vae.config.shift_factor))

    @property
    def plain_guidance(self) -> dict[str, float]:
        return {} if self.guidance is None else {"guidance_scale": self.guidance}


def _positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows * columns, 3]: (0, row, column) of every image token; text tokens are all at (0, 0, 0)."""
    counts = [torch.arange(n, dtype=torch.float32, device=device) for n in (1, rows, columns)]
    return torch.cartesian_prod(*counts)
