"""Wan 2.1 and 2.2 text-to-video, and any pipeline saved as `WanPipeline`.

Wan 2.2 A14B has two transformers: `Experts`. Wan 2.2 TI2V-5B takes a timestep for every token (`expand_timesteps`),
because a picture that a video begins with has no noise. Without such a picture the timesteps of a video are all the
same, and a single one gives the same prediction with less memory.

The published scheduler (UniPC) rounds timesteps to integers. Only its noise levels are used here, with marble's own
solvers and the exact timestep of each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models.base import DiffusionModel, Geometry
from marble_rl.models.experts import Experts
from marble_rl.models.pixels import decoded, per_channel, to_uint8
from marble_rl.types import Conditioning

HEIGHT, WIDTH, FRAMES = 480, 832, 81
"""diffusers' defaults: five seconds."""


@dataclass(frozen=True)
class WanConditioning(Conditioning):
    prompt_embeds: Tensor
    """[B, L, D] of UMT5, zero after a prompt's last token; Wan needs no mask"""


class WanModel(DiffusionModel):
    name = "Wan"
    pipeline_class = "WanPipeline"
    makes_videos = True
    default_text = 512
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(
        self, pipeline: Any, device: torch.device, text_length: int | None = None, guidance: float | None = None
    ) -> None:
        super().__init__(pipeline, device, text_length, guidance)
        self.pipeline.vae.enable_slicing()  # decode one video at a time: a batch would not fit into memory

    @classmethod
    def check_supported(cls, path: str) -> None:
        index = cls.diffusers_class().load_config(path)
        wanted = ["transformer", *([] if index.get("boundary_ratio") is None else ["transformer_2"])]
        missing = [part for part in wanted if (index.get(part) or [None])[0] is None]
        if missing:
            raise ValueError(f"its model_index.json has no {missing[0]}, which makes a part of its noise levels")

    def find_transformer(self) -> Any:
        high, boundary = self.pipeline.transformer, self.pipeline.config.boundary_ratio
        if boundary is None:
            return high
        return Experts(high, self.pipeline.transformer_2, boundary * self._timesteps)

    @property
    def _timesteps(self) -> int:
        return int(self.pipeline.scheduler.config.num_train_timesteps)

    def experts(self, sigmas: Tensor) -> Tensor:
        if not isinstance(self.transformer, Experts):
            return super().experts(sigmas)
        expert = self.transformer.is_low(sigmas * self._timesteps).long()
        return torch.where(torch.tensor(self.transformer.trains())[expert], expert, -1)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> WanConditioning:
        embeds, _ = self.pipeline.encode_prompt(
            prompt=list(texts),
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self._text_length,
        )
        return WanConditioning(embeds)

    def blank_conditioning(self, rows: int) -> WanConditioning:
        return WanConditioning(torch.zeros(rows, self._text_length, self.transformer.config.text_dim))

    @property
    def geometry(self) -> Geometry:
        config = self.transformer.config
        return Geometry(config.in_channels, self.pipeline.vae_scale_factor_spatial, config.patch_size[1], HEIGHT, WIDTH)

    def latent_shape(self, height: int | None, width: int | None, frames: int | None = None) -> tuple[int, ...]:
        channels, *size = super().latent_shape(height, width, frames)
        frames, scale = frames or FRAMES, self.pipeline.vae_scale_factor_temporal
        if (frames - 1) % scale:
            nearest = frames - (frames - 1) % scale
            raise InputError(
                f"frames: {frames} is not 1 more than a multiple of {scale}, which this model needs; "
                f"use {nearest} or {nearest + scale}"
            )
        return (channels, (frames - 1) // scale + 1, *size)

    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        return self.scheduler_sigmas(num_inference_steps=steps)

    def predict(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, WanConditioning)
        prediction: Tensor = self.transformer(
            hidden_states=x,
            timestep=sigma * self._timesteps,
            encoder_hidden_states=conditioning.prompt_embeds,
            return_dict=False,
        )[0]
        return prediction

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return to_uint8(decoded(vae, per_channel(latents, vae)))
