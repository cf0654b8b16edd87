"""Imitates CUDA on torch's meta device, as far as memory is concerned: autocast, and attention in linear memory.

The meta device runs neither: without this, a pass there would allocate other tensors than the same pass on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from marble_rl.models import pixels as decoded_pixels


@contextmanager
def as_on_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Make operations on meta tensors allocate what CUDA's autocast to ``dtype`` would.

    Attention needs memory linear in the tokens, as in CUDA's kernels. `Tensor.cpu` and the check for finite pixels,
    which need values, do nothing."""
    functional: Any = nn.functional
    half = dtype != torch.float32
    enabled, norm = torch.is_autocast_enabled, functional.layer_norm

    def cast_inputs(operation: Any) -> Any:
        """The operation with its inputs cast to ``dtype``, as autocast does for matrix products."""
        return lambda *tensors, **settings: operation(*(_cast(x, dtype) for x in tensors), **settings)

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(*(_cast(x, dtype) for x in (query, key, value)))

    def is_autocast_enabled(kind: str = "cuda") -> bool:
        return half if kind == "meta" else enabled(kind)

    changes: list[tuple[Any, str, Any]] = [
        (functional, "scaled_dot_product_attention", attention),
        (Tensor, "cpu", lambda tensor: tensor),
        (decoded_pixels, "all_finite", lambda pixels: True),
        (torch, "is_autocast_enabled", is_autocast_enabled),  # the fused layers call it
    ]
    if half:
        changes += [
            *((functional, name, cast_inputs(getattr(functional, name))) for name in ("linear", "conv2d", "conv3d")),
            *((torch, name, cast_inputs(getattr(torch, name))) for name in ("matmul", "bmm")),
            (functional, "layer_norm", lambda x, *rest, **settings: norm(x.float(), *rest, **settings)),
            (torch, "get_autocast_dtype", lambda kind: dtype),
        ]
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class _Attention(torch.autograd.Function):
    """Saves what flash attention saves for its backward pass: inputs, output and one number for every query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:-1], device=query.device))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
