"""The part that is the same for all families: a diffusers pipeline, its sizes, noise levels and LoRA files."""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from marble_rl.errors import InputError, NonFinite
from marble_rl.models.attention import HEAD, check_backward, choose_backend, leave_norms_plain
from marble_rl.models.base import DiffusionModel
from marble_rl.models.precision import PLAIN, MemorySettings
from marble_rl.models.quantization import quantization
from marble_rl.storage import save_safetensors

if TYPE_CHECKING:
    from typing_extensions import Self


JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""LoRA targets: the projections of image and text in transformers that attend to both at once."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a family's images, latents and tokens."""

    channels: int
    """Channels of a latent."""
    scale: int
    """Pixels per latent position, in each direction."""
    patch: int
    """Latent positions per token, in each direction."""
    height: int
    """Default size in pixels."""
    width: int


class PipelineModel(DiffusionModel):
    """A family with a pipeline in diffusers. A subclass implements encode, blank_conditioning, geometry, sigmas,
    predict and decode."""

    pipeline_class: ClassVar[Any]
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Attributes of the pipeline that hold its text encoders."""
    text_tokenizer: ClassVar[str] = "tokenizer"
    """Attribute of the pipeline that holds the tokenizer which ``text_length`` limits."""
    default_text: ClassVar[int]
    """diffusers' own ``max_sequence_length``."""

    def __init__(
        self, pipeline: Any, device: torch.device, text_length: int | None = None, guidance: float | None = None
    ) -> None:
        self.check_settings(text_length, guidance)
        self.pipeline = pipeline
        self.pipeline.set_progress_bar_config(disable=True)
        self.device = device
        self.guidance = guidance
        self._attention: str | None = None
        # diffusers pads prompts to its default length, even for a tokenizer that was built for fewer tokens.
        tokenizer = getattr(self.pipeline, self.text_tokenizer)
        most = self.default_text if tokenizer is None else tokenizer.model_max_length
        self._text_length = text_length or min(self.default_text, most)
        self.transformer = self.pipeline.transformer
        leave_norms_plain(self.transformer)
        for part in (self.transformer, self.pipeline.vae, *self.text_encoders):
            part.requires_grad_(False).eval()
        self.transformer.to(device)
        # channels_last is faster, but torch refuses it for a module that has both Conv2d and Conv3d.
        flat = not any(isinstance(module, torch.nn.Conv3d) for module in self.pipeline.vae.modules())
        self.pipeline.vae.to(device, **({"memory_format": torch.channels_last} if flat else {}))

    @classmethod
    def load(
        cls,
        path: str,
        device: torch.device,
        text_length: int | None = None,
        guidance: float | None = None,
        memory: MemorySettings = PLAIN,
    ) -> Self:
        dtypes = {"vae": memory.vae_dtype, "default": memory.dtype}
        pipeline = cls.pipeline_class.from_pretrained(path, dtype=dtypes, **quantization(memory))
        model = cls(pipeline, device, text_length, guidance)
        model.save_memory(memory)
        return model

    def save_memory(self, memory: MemorySettings) -> None:
        """Apply the settings that can be changed once the weights are loaded."""
        self.dtype = memory.dtype
        if memory.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self._attention = memory.attention
        if memory.attention is not None:
            choose_backend(self.transformer, self.name, memory.attention)
        if memory.decoding is not None:
            vae = self.pipeline.vae
            getattr(vae, "disable_slicing" if memory.decoding == "whole" else "enable_slicing")()
            if memory.decoding == "tiled":
                vae.enable_tiling()

    def check_trainable(self) -> None:
        if self._attention is not None:
            head = self.transformer.config.get("attention_head_dim", HEAD)
            check_backward(self._attention, self.device, self.dtype, head)

    def work_on(self, device: torch.device) -> None:
        self.device = device
        self.pipeline.vae.to(device)

    @property
    def text_encoders(self) -> list[torch.nn.Module]:
        parts = (getattr(self.pipeline, name) for name in self.text_parts)
        return [part for part in parts if part is not None]

    @property
    @abstractmethod
    def geometry(self) -> Geometry: ...

    def latent_shape(self, height: int | None, width: int | None, frames: int | None = None) -> tuple[int, ...]:
        self.check_settings(frames=frames)
        geometry = self.geometry
        height, width = height or geometry.height, width or geometry.width
        step = geometry.scale * geometry.patch
        for name, size in (("height", height), ("width", width)):
            if size % step:
                raise InputError(f"{name}: {size} is not a multiple of {step}, which this model needs")
        return (geometry.channels, height // geometry.scale, width // geometry.scale)

    def scheduler_sigmas(self, **arguments: Any) -> Tensor:
        """Noise levels of a fresh copy of the pipeline's scheduler, with ``arguments`` for its ``set_timesteps``."""
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(**arguments)
        sigmas = cast(Tensor, scheduler.sigmas.to(torch.float32))
        if sigmas[0] > 1 or sigmas[-1] != 0 or (sigmas.diff() >= 0).any():
            raise InputError(
                f"model.path: the noise levels of its {type(scheduler).__name__} do not fall from 1 to 0, as those of "
                "flow matching do; set use_flow_sigmas in scheduler/scheduler_config.json"
            )
        return sigmas

    def dynamic_shift(self, latent_shape: tuple[int, ...]) -> dict[str, float]:
        """The argument ``mu`` for a scheduler that shifts its levels by the size of the image; empty for others.

        As in diffusers' pipelines, mu is on the line through (fewest tokens, base_shift) and (most tokens, max_shift).
        """
        config = self.pipeline.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return {}
        few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        tokens = (latent_shape[-2] // self.geometry.patch) * (latent_shape[-1] // self.geometry.patch)
        slope = (high - low) / (many - few)
        return {"mu": tokens * slope + (low - slope * few)}

    def write_lora(self, folder: Path, adapter: str) -> None:
        metadata = _lora_metadata(self.transformer.peft_config[adapter])
        self.pipeline_class.save_lora_weights(
            str(folder),
            transformer_lora_layers=get_peft_model_state_dict(self.transformer, adapter_name=adapter),
            save_function=lambda tensors, path: save_safetensors(Path(path), tensors, metadata),
        )

    def read_lora(self, folder: Path) -> None:
        self.pipeline.load_lora_weights(str(folder))

    def plain_call(self) -> tuple[str, dict[str, Any]]:
        length = {} if self._text_length == self.default_text else {"max_sequence_length": self._text_length}
        return self.pipeline_class.__name__, {**self.plain_guidance, **length}

    @property
    def plain_guidance(self) -> dict[str, float]:
        """The argument of diffusers' pipeline that leaves classifier-free guidance off."""
        return {"guidance_scale": 1.0}


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Pixels in float32, whatever dtype the autoencoder computes in; ``latents`` are in the autoencoder's scale."""
    pixels: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    return pixels.float()


UNDECODED = (
    "decoding produced pixels that are not finite. Half precision overflows in many autoencoders: set model.vae_dtype: "
    "float32. If it is float32 already, the weights have diverged: lower optimizer.lr"
)


class NonFinitePixels(NonFinite):
    """The autoencoder overflowed. ``images``: black, of the right shape, for a rank in lockstep, which continues."""

    def __init__(self, images: Tensor) -> None:
        super().__init__(UNDECODED)
        self.images = images


def to_uint8(pixels: Tensor) -> Tensor:
    """Convert an autoencoder's pixels [B, 3, ...] in [-1, 1] to [B, ..., 3] in 0..255, on the CPU."""
    if not all_finite(pixels):
        # Converted to uint8, they would be scored like any other image.
        raise NonFinitePixels(_rounded(torch.zeros_like(pixels)))
    return _rounded(pixels)


def all_finite(pixels: Tensor) -> bool:
    """Checks the smallest and largest pixel only: `isfinite` of every pixel would allocate a tensor of that size."""
    return bool(torch.stack(pixels.aminmax()).isfinite().all())


def _rounded(pixels: Tensor) -> Tensor:
    unit = (pixels / 2 + 0.5).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).movedim(1, -1).contiguous().cpu()


def per_channel(latents: Tensor, vae: Any) -> Tensor:
    """Latents [B, C, F, H, W] in the scale of an autoencoder with a mean and a standard deviation for each channel."""
    mean, std = (
        torch.tensor(values, device=latents.device).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents * std + mean


def _lora_metadata(config: LoraConfig) -> dict[str, str]:
    """Header of a LoRA file. Without the adapter's config plain diffusers guesses alpha, and the scale is wrong.

    It holds only the keys that `LoraPolicy` sets: diffusers passes all of them to the reader's peft, and an older peft
    fails on keys that it does not know. Settings of the initialisation are not needed to read the weights.
    """
    kept = {"r": config.r, "lora_alpha": config.lora_alpha, "target_modules": sorted(config.target_modules)}
    prefixed = {f"transformer.{key}": value for key, value in kept.items()}
    return {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(prefixed, indent=2, sort_keys=True)}
