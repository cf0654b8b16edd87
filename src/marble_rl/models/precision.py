"""Which numbers the frozen base is held in, and how it is held in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from marble_rl.models.settings import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MemorySettings:
    """How a pipeline is held in memory."""

    dtype: torch.dtype = torch.float32
    """Of the frozen transformer and the text encoders, and of passes through the transformer"""
    vae_dtype: torch.dtype = torch.float32
    quantize: Literal["int8", "nf4"] | None = None
    gradient_checkpointing: bool = False
    attention: str | None = None
    decoding: Literal["whole", "sliced", "tiled"] | None = None


PLAIN = MemorySettings()
"""Everything in float32, nothing saved at the cost of time."""


def memory_settings(config: ModelConfig, device: torch.device) -> MemorySettings:
    """What a config asks for, on the device it runs on."""
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    return MemorySettings(
        dtype=automatic if config.dtype == "auto" else DTYPES[config.dtype],
        vae_dtype=DTYPES[config.vae_dtype],
        quantize=config.quantize,
        gradient_checkpointing=config.gradient_checkpointing,
        attention=config.attention,
        decoding=config.decoding,
    )


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Matrix products in ``dtype``; nothing at all for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
