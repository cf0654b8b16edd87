"""What the trainer needs to know about a model family. One small file per family implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from marble_rl.types import Conditioning


class DiffusionModel(ABC):
    """A flow-matching text-to-image model whose transformer carries the adapters."""

    transformer: Any
    """The diffusers model (an nn.Module) that is adapted."""
    device: torch.device
    lora_targets: ClassVar[list[str]]
    """Module names that are adapted by default."""

    @classmethod
    @abstractmethod
    def load(cls, path: str, device: torch.device, text_length: int | None = None) -> DiffusionModel:
        """Read a pipeline from a folder or the hub."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Text encoders' output for B prompts."""

    @abstractmethod
    def latent_shape(self, height: int | None, width: int | None) -> tuple[int, ...]:
        """Shape of one image's latent; None takes the model's own size."""

    @abstractmethod
    def sigmas(self, steps: int, latent_shape: tuple[int, ...]) -> Tensor:
        """[T + 1] float32 noise levels of the model's own schedule, descending, the last one 0."""

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v_theta(x [B, ...], sigma [B], prompts) of whichever adapter is active."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents to images [B, H, W, 3], uint8 on the CPU."""

    @abstractmethod
    def write_lora(self, folder: Path, adapter: str) -> None:
        """Write an adapter so that plain diffusers' ``load_lora_weights(folder)`` reads it, scale included."""

    @abstractmethod
    def read_lora(self, folder: Path) -> None:
        """Attach the LoRA in ``folder`` to the transformer, for sampling only."""


class PromptCache:
    """Prompt embeddings, encoded once per prompt text and kept on the CPU.

    Prompts are encoded one at a time: an embedding must not depend on its neighbours in a batch.
    """

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        self._rows: dict[str, Conditioning] = {}

    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Conditioning of the prompts on the model's device, in order."""
        for text in texts:
            if text not in self._rows:
                self._rows[text] = self._model.encode([text]).to(torch.device("cpu"))
        rows = [self._rows[text] for text in texts]
        return type(rows[0]).cat(rows).to(self._model.device)
