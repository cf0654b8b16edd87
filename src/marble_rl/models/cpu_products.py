"""Matrix products and attention in float32 on AMD processors with AVX-512.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's processors only. oneDNN, which torch brings
along, uses it on AMD's, too (docs/performance.md). torch has no setting for "oneDNN, in float32". It takes oneDNN where
products may be rounded to bfloat16 ("medium"), and oneDNN makes use of that permission only with AMX, which no AMD
processor has. So the setting is for these processors alone, and stays only if a product comes out as accurate as MKL's.
A GPU would round by the same setting: on a machine that has one, nothing changes.

torch's own attention multiplies small blocks one by one, and each is a call of oneDNN that costs more than the block.
`attention` multiplies those of several samples at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marble_rl.devices import accelerator

ACCURATE = 1e-6
"""Error of a product of float32 matrices, relative to its length; bfloat16 has 2e-3."""
MOST_WEIGHTS = 1 << 21
"""Attention weights of a sample (heads times queries times keys) up to which this is faster than torch's own"""
IN_CACHE = 1 << 18
"""Samples are taken together until they have this many attention weights: so many stay in the processor's cache."""

_own = F.scaled_dot_product_attention


@cache
def use_onednn() -> bool:
    """From now on multiply by oneDNN on the CPU, in the whole process, if this processor gains by it; whether it
    does."""
    if not _gains():
        return False
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    if _error() > ACCURATE:
        torch.set_float32_matmul_precision(before)
        return False
    F.scaled_dot_product_attention = attention
    return True


def _gains() -> bool:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 and later
    has = capabilities.get
    amd = "AMD" in str(has("cpu_name")) and bool(has("avx512_f")) and not has("amx_tile")
    return amd and torch.backends.mkldnn.is_available() and accelerator() is None


def _error() -> float:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 256, generator=draw), torch.randn(256, 256, generator=draw)
    exact = a.double() @ b.double()
    return float((a @ b - exact).norm() / exact.norm())


class _Attention(torch.autograd.Function):
    """softmax(Q K^T scale) V for [B, heads, tokens, width], some samples at a time. The attention weights are computed
    again in the backward pass, so that memory is linear in the tokens, as torch's own is."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        output = _tokens_first(query, value.shape[-1])
        for rows in _parts(query, key):
            output[rows] = _weights(query[rows], key[rows], scale) @ value[rows]
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grads = [_tokens_first(x, x.shape[-1]) for x in (query, key, value)]
        for rows in _parts(query, key):
            q, k, v, g = query[rows], key[rows], value[rows], grad[rows]
            weights = _weights(q, k, ctx.scale)
            grads[2][rows] = weights.transpose(-2, -1) @ g
            of_weights = g @ v.transpose(-2, -1)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(ctx.scale)
            grads[0][rows] = of_scores @ k
            grads[1][rows] = of_scores.transpose(-2, -1) @ q
        return *grads, None


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return ((query * scale) @ key.transpose(-2, -1)).softmax(-1)


def _tokens_first(like: Tensor, width: int) -> Tensor:
    """[B, heads, tokens, width], laid out as [B, tokens, heads, width]: joining the heads then needs no copy."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _parts(query: Tensor, key: Tensor) -> list[slice]:
    """Samples that are taken together."""
    batch, heads, queries, _ = query.shape
    size = max(1, IN_CACHE // (heads * queries * key.shape[-2]))
    return [slice(start, start + size) for start in range(0, batch, size)]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's `scaled_dot_product_attention`. With a mask, dropout, many tokens or autocast it is torch's own."""
    plain = attn_mask is None and dropout_p == 0 and not is_causal and not enable_gqa
    if not (plain and _fits(query, key, value) and not torch.is_autocast_enabled("cpu")):
        given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return _own(query, key, value, attn_mask, **given, enable_gqa=enable_gqa)
    output: Tensor = _Attention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    return output


def _fits(*inputs: Tensor) -> bool:
    query, key, value = inputs
    if any(x.ndim != 4 or x.device.type != "cpu" or x.dtype != torch.float32 for x in inputs):
        return False
    alike = query.shape[:2] == key.shape[:2] == value.shape[:2] and key.shape[2] == value.shape[2]
    return alike and 0 < query.shape[1] * query.shape[2] * key.shape[2] <= MOST_WEIGHTS
