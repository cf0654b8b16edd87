"""Attention in the transformers of all families: diffusers' backends, a check that gradients flow through them, and
queries and keys in the dtype of the values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from marble_rl.errors import InputError
from marble_rl.models.precision import autocast

TOKENS, HEADS, HEAD = 64, 2, 64
"""Shape of the inputs in `check_backward`. With a single token, queries and keys would have no gradient whatever the
backend. HEAD is for transformers whose config names no head size."""


def choose_backend(transformer: Any, family: str, backend: str) -> None:
    """Set the attention backend that `model.attention` names."""
    processors = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        raise InputError(
            f"model.attention: {backend!r} given, but in diffusers {family} has no choice of backends; leave it out"
        )
    try:
        transformer.set_attention_backend(backend)
    except (ValueError, RuntimeError, ImportError) as error:
        raise InputError(f"model.attention: {backend!r} cannot be used here: {error}") from error


def check_backward(backend: str, device: torch.device, dtype: torch.dtype, head: int = HEAD) -> None:
    """Refuse a backend without a backward pass. Several have none, and silently cut off the gradients of all earlier
    layers."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    draw = torch.Generator().manual_seed(0)
    shape = (1, TOKENS, HEADS, head)
    inputs = [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for _ in range(3)]
    try:
        with torch.enable_grad(), autocast(device, dtype):
            output: Tensor = dispatch_attention_fn(*inputs, backend=backend.lower())
        attached = output.requires_grad
        gradients = (
            torch.autograd.grad(output.float().square().sum(), inputs, allow_unused=True) if attached else [None] * 3
        )
    except Exception as error:  # kernels of many packages, each with its own exceptions
        raise InputError(
            f"model.attention: {backend!r} cannot be trained with in {str(dtype).removeprefix('torch.')} on "
            f"{device.type}: {error}; use native, or leave it out"
        ) from error
    names = ("queries", "keys", "values")
    cut = [name for name, gradient in zip(names, gradients, strict=True) if not _flows(gradient)]
    if cut:
        raise InputError(
            f"model.attention: {backend!r} gives no gradient for {', '.join(cut)}: it can sample, but not train; "
            "use native or flash, or leave it out"
        )


def _flows(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


class PlainRMSNorm(nn.RMSNorm):
    """Computes in the dtype of its input, as on the CPU and in plain diffusers.

    The autocast of GPUs would compute it, and save its input, in float32. The queries and keys of FLUX and Wan would
    then take twice the memory, and differ in dtype from the values, which flash attention refuses.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not torch.amp.is_autocast_available(x.device.type):  # the meta device of memory estimates
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


def leave_norms_plain(transformer: nn.Module) -> None:
    """Exclude the RMS norms from autocast. Their weights keep their names and dtypes."""
    for module in transformer.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = PlainRMSNorm
