"""What the trainer needs to know about a model family. One small file per family implements it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.models.precision import PLAIN, MemorySettings, autocast
from marble_rl.types import Conditioning, Media


class DiffusionModel(ABC):
    """A flow-matching text-to-image or text-to-video model whose transformer carries the adapters.

    A sample is an image, uint8 [H, W, 3], or a video [F, H, W, 3]; the solvers, the loss and the gradients treat the
    latents of both alike: [B, ...].
    """

    name: ClassVar[str]
    """Of the family, in messages."""
    makes_videos: ClassVar[bool] = False
    """Whether it takes a number of frames, and its samples have them."""
    takes_guidance: ClassVar[bool] = False
    """Whether the transformer is told a guidance scale. This is not classifier-free guidance: it costs no pass."""
    most_text: ClassVar[int | None] = None
    """Tokens of a prompt that plain diffusers takes at most."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Module names that are adapted by default."""

    transformer: Any
    """The diffusers model (an nn.Module) that is adapted."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    """Of the frozen transformer, and of the passes through it."""

    @classmethod
    @abstractmethod
    def load(
        cls,
        path: str,
        device: torch.device,
        text_length: int | None = None,
        guidance: float | None = None,
        memory: MemorySettings = PLAIN,
    ) -> DiffusionModel:
        """Read a pipeline from a folder or the hub."""

    @classmethod
    def media(cls) -> Media:
        return "video" if cls.makes_videos else "image"

    @classmethod
    def check_settings(
        cls, text_length: int | None = None, guidance: float | None = None, frames: int | None = None
    ) -> None:
        """Refuse settings that the family does not have. Nothing is loaded for it."""
        if guidance is not None and not cls.takes_guidance:
            raise InputError(f"model.guidance: {guidance} given, but {cls.name} takes no guidance scale; leave it out")
        if frames is not None and not cls.makes_videos:
            raise InputError(f"rollout.frames: {frames} given, but {cls.name} makes images, not videos; leave it out")
        if text_length is not None and cls.most_text is not None and text_length > cls.most_text:
            raise InputError(f"model.text_length: {text_length} is more than the {cls.most_text} that {cls.name} takes")

    @abstractmethod
    def check_trainable(self) -> None:
        """Refuse what the loaded model can sample with, but not train with."""

    @abstractmethod
    def work_on(self, device: torch.device) -> None:
        """Go on on another device, to which the transformer has been brought already."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Text encoders' output for B prompts."""

    @abstractmethod
    def blank_conditioning(self, rows: int) -> Conditioning:
        """Zeros in the shapes of ``encode``, for estimates of memory."""

    @property
    @abstractmethod
    def text_encoders(self) -> list[torch.nn.Module]:
        """They stay in the CPU's memory and visit the device only to encode."""

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Text encoders on the device for as long as this lasts; a 4.7 B parameter T5 would fill half a small card."""
        away = self.device.type != "cpu"
        for encoder in self.text_encoders if away else ():
            encoder.to(self.device)
        try:
            yield
        finally:
            for encoder in self.text_encoders if away else ():
                encoder.to("cpu")

    @abstractmethod
    def latent_shape(self, height: int | None, width: int | None, frames: int | None = None) -> tuple[int, ...]:
        """Shape of one sample's latent; None takes the model's own size."""

    @abstractmethod
    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        """[T + 1] float32 noise levels of the model's own schedule, descending, the last one 0."""

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v_theta(x [B, ...], sigma [B], prompts) = noise - data, of whichever adapter is active; float32."""
        with autocast(self.device, self.dtype):
            prediction = self.predict(x, sigma, conditioning.trimmed())
        return prediction.float()

    @abstractmethod
    def predict(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer's velocity, in whatever numbers it comes."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents to images [B, H, W, 3] or videos [B, F, H, W, 3], uint8 on the CPU."""

    @abstractmethod
    def write_lora(self, folder: Path, adapter: str) -> None:
        """Write an adapter so that plain diffusers' ``load_lora_weights(folder)`` reads it, scale included."""

    @abstractmethod
    def read_lora(self, folder: Path) -> None:
        """Attach the LoRA in ``folder`` to the transformer, for sampling only."""

    @abstractmethod
    def plain_call(self) -> tuple[str, dict[str, Any]]:
        """The class of diffusers' pipeline, and the arguments with which a call of it samples as we do."""


CACHE_BYTES = 4 << 30
"""Of prompt embeddings in memory: about 800 prompts of SD3.5, which take 5 MB each."""


class PromptCache:
    """Prompt embeddings, encoded once per prompt text and kept on the CPU; those unused for longest are forgotten.

    Prompts are encoded one at a time: an embedding must not depend on its neighbours in a batch.
    """

    def __init__(self, model: DiffusionModel, limit: int = CACHE_BYTES) -> None:
        self._model = model
        self._limit = limit
        self._bytes = 0
        self._rows: dict[str, Conditioning] = {}

    def prepare(self, texts: Sequence[str]) -> None:
        """Encode prompts that are asked for soon, the first of them, as many as fit, in one visit of the encoders."""
        self._fetch(texts, most=self._limit)

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Conditioning of the prompts on the model's device, in order."""
        known = self._fetch(texts)
        rows = [known[text] for text in texts]
        return type(rows[0]).cat(rows).to(self._model.device)

    def _fetch(self, texts: Sequence[str], most: float = math.inf) -> dict[str, Conditioning]:
        """Embeddings by prompt, in order, as long as all together take no more than ``most`` bytes."""
        asked = list(dict.fromkeys(texts))
        found: dict[str, Conditioning] = {}
        taken = 0
        with self._model.encoding() if any(text not in self._rows for text in asked) else nullcontext():
            for text in asked:
                known = self._rows.get(text)
                row = self._model.encode([text]).to(torch.device("cpu")) if known is None else known
                taken += row.bytes
                if taken > most:
                    break
                found[text] = row
                self._bytes += row.bytes if known is None else 0
        for text, row in found.items():  # the newest come last
            self._rows.pop(text, None)
            self._rows[text] = row
        while self._bytes > self._limit and len(self._rows) > 1:
            oldest = next(iter(self._rows))
            self._bytes -= self._rows.pop(oldest).bytes
        return found
