"""The interface of a model family to the trainer. Each family implements it in one small file."""

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

    transformer: Any
    """The diffusers model (an nn.Module) that is adapted."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    """Precision of the frozen transformer, and of the passes through it."""

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
        """Refuse settings that the family does not have. Loads nothing."""
        if guidance is not None and not cls.takes_guidance:
            raise InputError(f"model.guidance: {guidance} given, but {cls.name} takes no guidance scale; leave it out")
        if frames is not None and not cls.makes_videos:
            raise InputError(f"rollout.frames: {frames} given, but {cls.name} makes images, not videos; leave it out")
        if text_length is not None and cls.most_text is not None and text_length > cls.most_text:
            raise InputError(f"model.text_length: {text_length} is more than the {cls.most_text} that {cls.name} takes")

    @abstractmethod
    def check_trainable(self) -> None:
        """Refuse settings with which the loaded model can sample, but not train."""

    @abstractmethod
    def work_on(self, device: torch.device) -> None:
        """Use another device from now on. The transformer must be there already; the other parts are moved."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Text encoders' output for B prompts."""

    @abstractmethod
    def blank_conditioning(self, rows: int) -> Conditioning:
        """Zeros in the shapes that ``encode`` returns, for estimates of memory."""

    @property
    @abstractmethod
    def text_encoders(self) -> list[torch.nn.Module]:
        """They stay in the CPU's memory and are on the device only inside ``encoding``."""

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

    @abstractmethod
    def latent_shape(self, height: int | None, width: int | None, frames: int | None = None) -> tuple[int, ...]:
        """Shape of one sample's latent; None takes the model's default size."""

    @abstractmethod
    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        """[T + 1] float32 noise levels of the model's own schedule, descending, the last one 0."""

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

    @abstractmethod
    def write_lora(self, folder: Path, adapter: str) -> None:
        """Write an adapter for plain diffusers' ``load_lora_weights(folder)``, with the metadata for its scale."""

    @abstractmethod
    def read_lora(self, folder: Path) -> None:
        """Attach the LoRA in ``folder`` to the transformer, for sampling only."""

    @abstractmethod
    def plain_call(self) -> tuple[str, dict[str, Any]]:
        """The class of diffusers' pipeline, and the arguments with which calling it samples as marble does."""


CACHE_BYTES = 4 << 30
"""Limit for prompt embeddings in memory: about 800 prompts of SD3.5, which take 5 MB each."""


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
