"""Attention in the transformers of all families: diffusers' backends, whether gradients come back through them, and
queries and keys in the numbers of the values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from marble_rl.errors import InputError
from marble_rl.models.precision import autocast

TOKENS, HEADS, HEAD = 64, 2, 64
"""Of the probe: more than one token, or queries and keys would have no gradient by any backend. The size of a head is
for transformers whose config names none."""


def choose_backend(transformer: Any, family: str, backend: str) -> None:
    """Let the transformer attend by the backend that `model.attention` names."""
    processors = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise InputError(
            f"model.attention: {backend!r} given, but diffusers lets {family} choose no backend; leave it out"
        )
    try:
        transformer.set_attention_backend(backend)
    except (ValueError, RuntimeError, ImportError) as error:
        raise InputError(f"model.attention: {backend!r} cannot be used here: {error}") from error


def check_backward(backend: str, device: torch.device, dtype: torch.dtype, head: int = HEAD) -> None:
    """Refuse a backend that only goes forward. Several do, and cut the gradients of all layers before it silently."""
    draw = torch.Generator().manual_seed(0)
    shape = (1, TOKENS, HEADS, head)
    inputs = [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for _ in range(3)]
    try:
        with torch.enable_grad(), autocast(device, dtype):
            output: Tensor = dispatch_attention_fn(*inputs, backend=backend.lower())
        attached = output.requires_grad
        found = (
            torch.autograd.grad(output.float().square().sum(), inputs, allow_unused=True) if attached else [None] * 3
        )
    except Exception as error:  # kernels of many packages: each fails in its own way
        raise InputError(
            f"model.attention: {backend!r} cannot be trained with in {str(dtype).removeprefix('torch.')} on "
            f"{device.type}: {error}; use native, or leave it out"
        ) from error
    cut = [name for name, gradient in zip(("queries", "keys", "values"), found, strict=True) if not _flows(gradient)]
    if cut:
        raise InputError(
            f"model.attention: {backend!r} gives no gradient of {', '.join(cut)}: it can be sampled with, not "
            "trained with; use native or flash, or leave it out"
        )


def _flows(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


class PlainRMSNorm(nn.RMSNorm):
    """In the numbers of its input, as on the CPU and in plain diffusers.

    CUDA's autocast would compute it, and keep its input, in float32: the queries and keys of FLUX and Wan would take
    twice the memory, and differ from the values in type, which flash attention refuses.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False) if x.is_cuda else nullcontext():
            return super().forward(x)


def leave_norms_plain(transformer: nn.Module) -> None:
    """Out of autocast's hands. Numbers and names of their weights stay what they are."""
    for module in transformer.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = PlainRMSNorm
