"""A model family to the trainer: what is the same for all diffusers pipelines, and what each family writes itself in
one small file."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models.attention import HEAD, check_backward, choose_backend, leave_norms_plain
from marble_rl.models.cpu_products import use_onednn
from marble_rl.models.experts import LOADED_WITH, parts_of
from marble_rl.models.lora_files import locate_parts, lora_name
from marble_rl.models.lora_formats import LoraFormat, write_lora
from marble_rl.models.parts import load_parts
from marble_rl.models.precision import PLAIN, MemorySettings, autocast
from marble_rl.types import Conditioning, Media

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


class DiffusionModel(ABC):
    """A flow-matching text-to-image or text-to-video pipeline of diffusers whose transformer carries the adapters.

    A sample is an image, uint8 [H, W, 3], or a video [F, H, W, 3]; the solvers, the loss and the gradients treat the
    latents of both alike: [B, ...]. A family implements encode, blank_conditioning, geometry, sigmas, predict and
    decode.
    """

    name: ClassVar[str]
    """Name of the family in messages."""
    makes_videos: ClassVar[bool] = False
    """Whether its samples are videos, with a number of frames."""
    takes_guidance: ClassVar[bool] = False
    """Whether a guidance scale is an input of the transformer. This is not classifier-free guidance, which would cost a
    second pass."""
    most_text: ClassVar[int | None] = None
    """Longest prompt that plain diffusers accepts, in tokens."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Names of the modules that are adapted by default."""
    pipeline_class: ClassVar[str]
    """Name of diffusers' class: importing diffusers takes seconds, which a check of a config should not."""
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Attributes of the pipeline that hold its text encoders."""
    text_tokenizer: ClassVar[str] = "tokenizer"
    """Attribute of the pipeline that holds the tokenizer which ``text_length`` limits."""
    default_text: ClassVar[int]
    """diffusers' own ``max_sequence_length``."""

    transformer: Any
    """The diffusers model (an nn.Module) that is adapted, or `Experts`, which stands for two of them."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    """Precision of the frozen transformer, and of the passes through it."""

    def __init__(
        self, pipeline: Any, device: torch.device, text_length: int | None = None, guidance: float | None = None
    ) -> None:
        self.check_settings(text_length, guidance)
        use_onednn()
        self.pipeline = pipeline
        self.pipeline.set_progress_bar_config(disable=True)
        self.device = device
        self.guidance = guidance
        self._attention: str | None = None
        # diffusers pads prompts to its default length, even for a tokenizer that was built for fewer tokens.
        tokenizer = getattr(self.pipeline, self.text_tokenizer)
        most = self.default_text if tokenizer is None else tokenizer.model_max_length
        self._text_length = text_length or min(self.default_text, most)
        self.transformer = self.find_transformer()
        leave_norms_plain(self.transformer)
        for part in (self.transformer, self.pipeline.vae, *self.text_encoders):
            part.requires_grad_(False).eval()
        self.transformer.to(device)
        # channels_last is faster, but torch refuses it for a module that has both Conv2d and Conv3d.
        flat = not any(isinstance(module, torch.nn.Conv3d) for module in self.pipeline.vae.modules())
        self.pipeline.vae.to(device, **({"memory_format": torch.channels_last} if flat else {}))

    def find_transformer(self) -> Any:
        """The module that predicts and is adapted."""
        return self.pipeline.transformer

    @classmethod
    def check_supported(cls, path: str) -> None:
        """Raise ValueError for a pipeline of this class that the family cannot use. Reads no weights."""
        return

    @classmethod
    def load(
        cls,
        path: str,
        device: torch.device,
        text_length: int | None = None,
        guidance: float | None = None,
        memory: MemorySettings = PLAIN,
    ) -> Self:
        """Read a pipeline from a folder or the hub."""
        cls.check_supported(path)
        kind = cls.diffusers_class()
        parts = load_parts(kind.load_config(path), path, memory)
        pipeline = kind.from_pretrained(path, trust_remote_code=False, **parts)
        model = cls(pipeline, device, text_length, guidance)
        model.save_memory(memory)
        return model

    @classmethod
    def diffusers_class(cls) -> Any:
        import diffusers

        return getattr(diffusers, cls.pipeline_class)

    @classmethod
    def media(cls) -> Media:
        return "video" if cls.makes_videos else "image"

    @classmethod
    def check_settings(
        cls, text_length: int | None = None, guidance: float | None = None, frames: int | None = None
    ) -> None:
        """Refuse settings that the family does not have. Loads nothing."""
        if guidance is not None and not cls.takes_guidance:
            raise InputError(f"model.guidance: {guidance} given, but {cls.name} takes no guidance scale; leave it out")
        if frames is not None and not cls.makes_videos:
            raise InputError(f"rollout.frames: {frames} given, but {cls.name} makes images, not videos; leave it out")
        if text_length is not None and cls.most_text is not None and text_length > cls.most_text:
            raise InputError(f"model.text_length: {text_length} is more than the {cls.most_text} that {cls.name} takes")

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
        """Refuse settings with which the loaded model can sample, but not train."""
        if self._attention is not None:
            head = self.transformer.config.get("attention_head_dim", HEAD)
            check_backward(self._attention, self.device, self.dtype, head)

    def work_on(self, device: torch.device) -> None:
        """Use another device from now on. The transformer must be there already; the other parts are moved."""
        self.device = device
        self.pipeline.vae.to(device)

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Text encoders' output for B prompts."""

    @abstractmethod
    def blank_conditioning(self, rows: int) -> Conditioning:
        """Zeros in the shapes that ``encode`` returns, for estimates of memory."""

    @property
    def text_encoders(self) -> list[torch.nn.Module]:
        """They stay in the CPU's memory and are on the device only inside ``encoding``."""
        parts = (getattr(self.pipeline, name) for name in self.text_parts)
        return [part for part in parts if part is not None]

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Have the text encoders on the device inside the block only: a T5 of 4.7 B parameters would fill half of a
        small GPU."""
        moved = self.text_encoders if self.device.type != "cpu" else []
        for encoder in moved:
            encoder.to(self.device)
        try:
            yield
        finally:
            for encoder in moved:
                encoder.to("cpu")

    @property
    @abstractmethod
    def geometry(self) -> Geometry: ...

    def latent_shape(self, height: int | None, width: int | None, frames: int | None = None) -> tuple[int, ...]:
        """Shape of one sample's latent; None takes the model's default size."""
        self.check_settings(frames=frames)
        geometry = self.geometry
        height, width = height or geometry.height, width or geometry.width
        step = geometry.scale * geometry.patch
        for name, size in (("height", height), ("width", width)):
            if size % step:
                raise InputError(f"{name}: {size} is not a multiple of {step}, which this model needs")
        return (geometry.channels, height // geometry.scale, width // geometry.scale)

    @abstractmethod
    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        """[T + 1] float32 noise levels of the model's own schedule, descending, the last one 0."""

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

    def experts(self, sigmas: Tensor) -> Tensor:
        """Which expert predicts at each of these noise levels: 0 or 1; -1 if it is not trained. [T] on the CPU."""
        return torch.zeros(len(sigmas), dtype=torch.long)

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v_theta(x [B, ...], sigma [B], prompts) = noise - data, with the active adapter; float32."""
        with autocast(self.device, self.dtype):
            prediction = self.predict(x, sigma, conditioning.trimmed())
        return prediction.float()

    @abstractmethod
    def predict(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer's velocity, in whatever dtype it returns."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode clean latents to images [B, H, W, 3] or videos [B, F, H, W, 3], uint8 on the CPU."""

    def write_lora(self, folder: Path, adapter: str, layout: LoraFormat = "diffusers") -> None:
        """Write an adapter as files that other programs read, one for each adapted transformer (docs/exporting.md)."""
        for part, transformer in parts_of(self.transformer).items():
            if adapter in getattr(transformer, "peft_config", {}):
                write_lora(folder / lora_name(part), transformer, adapter, self.pipeline_class, layout)

    def read_lora(self, path: Path) -> None:
        """Attach the LoRA at ``path``, a folder or a file, to the transformer, for sampling only."""
        for part, file in locate_parts(path, "target", list(parts_of(self.transformer))).items():
            self.pipeline.load_lora_weights(str(file), use_safetensors=True, **LOADED_WITH.get(part, {}))

    def plain_call(self) -> tuple[str, dict[str, Any]]:
        """The class of diffusers' pipeline, and the arguments with which calling it samples as marble does."""
        length = {} if self._text_length == self.default_text else {"max_sequence_length": self._text_length}
        return self.pipeline_class, {**self.plain_guidance, **length}

    @property
    def plain_guidance(self) -> dict[str, float]:
        """The argument of diffusers' pipeline that leaves classifier-free guidance off."""
        return {"guidance_scale": 1.0}


CACHE_BYTES = 4 << 30
"""Limit for prompt embeddings in memory: about 1,500 prompts of SD3.5, which take 2.7 MB each in bfloat16: 77 tokens of
CLIP and 256 of T5, 4096 numbers each."""


class PromptCache:
    """A cache of prompt embeddings by prompt text, on the CPU; the least recently used are dropped first.

    Prompts are encoded one at a time: an embedding must not depend on its neighbours in a batch.
    """

    def __init__(self, model: DiffusionModel, limit: int = CACHE_BYTES) -> None:
        self._model = model
        self._limit = limit
        self._bytes = 0
        self._rows: dict[str, Conditioning] = {}

    def prepare(self, texts: Sequence[str]) -> None:
        """Encode prompts that will be needed soon, in order and as many as fit, while the encoders are on the device
        once."""
        self._fetch(texts, most=self._limit)

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Conditioning of the prompts on the model's device, in order."""
        known = self._fetch(texts)
        rows = [known[text] for text in texts]
        return type(rows[0]).cat(rows).to(self._model.device)

    def _fetch(self, texts: Sequence[str], most: float = math.inf) -> dict[str, Conditioning]:
        """Embeddings by prompt, in order, stopping before they take more than ``most`` bytes."""
        distinct = list(dict.fromkeys(texts))
        fetched: dict[str, Conditioning] = {}
        taken = 0
        with self._model.encoding() if any(text not in self._rows for text in distinct) else nullcontext():
            for text in distinct:
                known = self._rows.get(text)
                row = self._model.encode([text]).to(torch.device("cpu")) if known is None else known
                taken += row.bytes
                if taken > most:
                    break
                fetched[text] = row
                self._bytes += row.bytes if known is None else 0
        for text, row in fetched.items():  # the most recently used come last
            self._rows.pop(text, None)
            self._rows[text] = row
        while self._bytes > self._limit and len(self._rows) > 1:
            oldest = next(iter(self._rows))
            self._bytes -= self._rows.pop(oldest).bytes
        return fetched
