"""Stable Diffusion 3 and 3.5, and any pipeline saved as `StableDiffusion3Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from peft import get_peft_model_state_dict
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models.base import DiffusionModel
from marble_rl.storage import save_safetensors
from marble_rl.types import Conditioning


@dataclass(frozen=True)
class SD3Conditioning(Conditioning):
    prompt_embeds: Tensor
    """[B, L, D]"""
    pooled: Tensor
    """[B, D']"""


DIFFUSERS_TEXT_LENGTH = 256


class SD3Model(DiffusionModel):
    lora_targets: ClassVar[list[str]] = [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ]

    def __init__(self, pipeline: Any, device: torch.device, text_length: int | None = None) -> None:
        self.pipeline = pipeline
        self.pipeline.set_progress_bar_config(disable=True)
        self.device = device
        # diffusers pads prompts to 256 T5 tokens, also for a T5 that was built for fewer.
        self._text_length = text_length or min(DIFFUSERS_TEXT_LENGTH, self.pipeline.tokenizer_3.model_max_length)
        self.transformer = self.pipeline.transformer
        for part in (self.transformer, self.pipeline.vae, *self.text_encoders):
            part.requires_grad_(False).eval()
        self.transformer.to(device)
        self.pipeline.vae.to(device, memory_format=torch.channels_last)  # the faster layout for convolutions

    @classmethod
    def load(cls, path: str, device: torch.device, text_length: int | None = None) -> SD3Model:
        return cls(StableDiffusion3Pipeline.from_pretrained(path, dtype=torch.float32), device, text_length)

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

    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        scale = self.pipeline.vae_scale_factor
        own = self.pipeline.default_sample_size * scale
        step = scale * self.transformer.config.patch_size
        for name, size in (("height", height or own), ("width", width or own)):
            if size % step:
                raise InputError(f"{name}: {size} is not a multiple of {step}, which this model needs")
        return (self.transformer.config.in_channels, (height or own) // scale, (width or own) // scale)

    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.pipeline.scheduler.config)
        shift: dict[str, Any] = {}
        if scheduler.config.use_dynamic_shifting:
            from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

            patch = self.transformer.config.patch_size
            tokens = (latent_shape[-2] // patch) * (latent_shape[-1] // patch)
            names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
            shift["mu"] = calculate_shift(tokens, *(scheduler.config[name] for name in names))
        scheduler.set_timesteps(steps, **shift)
        return cast(Tensor, scheduler.sigmas.to(torch.float32))

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert isinstance(conditioning, SD3Conditioning)
        # Never rounded to an integer, in sampling or in training: both see the same timestep.
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
        pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        unit = (pixels / 2 + 0.5).clamp(0, 1)
        return cast(Tensor, (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu())

    def write_lora(self, folder: Path, adapter: str) -> None:
        config = self.transformer.peft_config[adapter].to_dict()
        metadata = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        weights = get_peft_model_state_dict(self.transformer, adapter_name=adapter)
        StableDiffusion3Pipeline.save_lora_weights(
            str(folder),
            transformer_lora_layers=weights,
            save_function=lambda tensors, path: save_safetensors(
                Path(path), tensors, _diffusers_lora_metadata(metadata)
            ),
        )

    def read_lora(self, folder: Path) -> None:
        self.pipeline.load_lora_weights(str(folder))

    @property
    def text_encoders(self) -> list[torch.nn.Module]:
        parts = (self.pipeline.text_encoder, self.pipeline.text_encoder_2, self.pipeline.text_encoder_3)
        return [part for part in parts if part is not None]


def _diffusers_lora_metadata(config: dict[str, Any]) -> dict[str, str]:
    """Header of a LoRA file. Without the adapter's config plain diffusers guesses alpha, and the scale is wrong."""
    import json

    from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY

    prefixed = {f"transformer.{key}": value for key, value in config.items()}
    return {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(prefixed, indent=2, sort_keys=True)}
