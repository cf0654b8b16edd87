"""Qwen-Image, and any pipeline saved as `QwenImagePipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from marble_rl.models.base import JOINT_ATTENTION, DiffusionModel, Geometry
from marble_rl.models.packing import PATCH, pack, unpack
from marble_rl.models.pixels import decoded, per_channel, to_uint8
from marble_rl.types import Conditioning


@dataclass(frozen=True)
class QwenImageConditioning(Conditioning):
    prompt_embeds: Tensor
    """[B, L, D], zero after a prompt's last token"""
    mask: Tensor | None
    """[B, L] bool: True where there is a token. None, in a forward pass only: True everywhere"""

    def trimmed(self) -> QwenImageConditioning:
        """Cut to the longest prompt. Samples of a single prompt then need no mask, which is faster."""
        if self.mask is None:
            return self
        mask = self.mask[:, : int(self.mask.sum(1).max())]
        return QwenImageConditioning(self.prompt_embeds[:, : mask.shape[1]], None if mask.all() else mask)


class QwenImageModel(DiffusionModel):
    name = "Qwen-Image"
    pipeline_class = "QwenImagePipeline"
    default_text = 512
    most_text = 1024
    lora_targets = JOINT_ATTENTION

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> QwenImageConditioning:
        """Pad to a fixed length, so that any two prompts can be joined; diffusers pads to the longest of a batch."""
        embeds, mask = self.pipeline.encode_prompt(
            prompt=list(texts), device=self.device, max_sequence_length=self._text_length
        )
        mask = torch.ones(embeds.shape[:2], device=self.device) if mask is None else mask  # None: no padding
        missing = self._text_length - embeds.shape[1]
        padded = nn.functional.pad(embeds, (0, 0, 0, missing))
        return QwenImageConditioning(padded, nn.functional.pad(mask.bool(), (0, missing)))

    def blank_conditioning(self, rows: int) -> QwenImageConditioning:
        return QwenImageConditioning(
            torch.zeros(rows, self._text_length, self.transformer.config.joint_attention_dim), None
        )

    @property
    def geometry(self) -> Geometry:
        scale = self.pipeline.vae_scale_factor
        own = self.pipeline.default_sample_size * scale
        return Geometry(self.transformer.config.in_channels // PATCH**2, scale, PATCH, own, own)

    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        return self.scheduler_sigmas(sigmas=np.linspace(1.0, 1 / steps, steps), **self.dynamic_shift(latent_shape))

    def predict(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, QwenImageConditioning)
        height, width = x.shape[-2:]
        prediction = self.transformer(
            hidden_states=pack(x),
            timestep=sigma,  # the transformer multiplies by 1000
            encoder_hidden_states=conditioning.prompt_embeds,
            encoder_hidden_states_mask=conditioning.mask,
            img_shapes=[[(1, height // PATCH, width // PATCH)]] * len(x),
            return_dict=False,
        )[0]
        return unpack(prediction, height, width)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """The autoencoder is made for videos: an image is a video of one frame."""
        vae = self.pipeline.vae
        return to_uint8(decoded(vae, per_channel(latents[:, :, None], vae))[:, :, 0])

    @property
    def plain_guidance(self) -> dict[str, float]:
        return {"true_cfg_scale": 1.0}
