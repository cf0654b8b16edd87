"""The precision of the frozen base model, and the settings that save memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from marble_rl.devices import supports_bfloat16
from marble_rl.models.settings import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"int8": 8.0, "nf4": 4.5}
"""Bits per quantised weight; nf4 has a float32 scale for every 64 weights."""


@dataclass(frozen=True)
class MemorySettings:
    """Precision of a pipeline, and what trades time for memory; see `ModelConfig`."""

    dtype: torch.dtype = torch.float32
    """Precision of the frozen transformer and the text encoders, and of passes through the transformer"""
    vae_dtype: torch.dtype = torch.float32
    quantize: Literal["int8", "nf4"] | None = None
    gradient_checkpointing: bool = False
    attention: str | None = None
    decoding: Literal["whole", "sliced", "tiled"] | None = None


PLAIN = MemorySettings()
"""Everything in float32, no memory saved at the cost of time."""


def memory_settings(config: ModelConfig, device: torch.device) -> MemorySettings:
    """The settings of a config; ``device`` decides about `dtype: auto`."""
    return MemorySettings(
        dtype=automatic_dtype(device) if config.dtype == "auto" else DTYPES[config.dtype],
        vae_dtype=DTYPES[config.vae_dtype],
        quantize=config.quantize,
        gradient_checkpointing=config.gradient_checkpointing,
        attention=config.attention,
        decoding=config.decoding,
    )


def automatic_dtype(device: torch.device) -> torch.dtype:
    """What `dtype: auto` means: the half precision that the device computes in; float32 on the CPU, and on a device
    without autocast."""
    if device.type == "cpu" or not torch.amp.is_autocast_available(device.type):
        return torch.float32
    return torch.bfloat16 if supports_bfloat16(device) else torch.float16


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """torch's autocast to ``dtype``; does nothing for float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
