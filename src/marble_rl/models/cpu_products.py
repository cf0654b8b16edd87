"""Matrix products and attention in float32 on AMD processors with AVX-512.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's processors only. oneDNN, which torch brings
along, uses it on AMD's, too (docs/performance.md). torch has no setting for "oneDNN, in float32". It takes oneDNN where
products may be rounded to bfloat16, and oneDNN makes use of that permission only with AMX, which no AMD processor has.
So the setting is for these processors alone, and stays only if a product comes out as accurate as MKL's.

torch's own attention multiplies small blocks one by one, and each is a call of oneDNN that costs more than the block.
`attention` multiplies those of all heads at once.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACCURATE = 1e-6
"""Error of a product of float32 matrices, relative to its length; bfloat16 has 2e-3."""
LONGEST = 512 * 512
"""Queries times keys of a head, up to which all heads' attention weights are held at once."""

_own = F.scaled_dot_product_attention


@cache
def use_onednn() -> bool:
    """From now on multiply by oneDNN, in the whole process, if this processor gains by it; whether it does."""
    if not _gains():
        return False
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    if _error() > ACCURATE:
        products.fp32_precision = before
        return False
    F.scaled_dot_product_attention = attention
    return True


def _gains() -> bool:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.12 and later
    has = capabilities.get
    amd = "AMD" in str(has("cpu_name"))
    return amd and bool(has("avx512_f")) and not has("amx_tile") and torch.backends.mkldnn.is_available()


def _error() -> float:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 256, generator=draw), torch.randn(256, 256, generator=draw)
    exact = a.double() @ b.double()
    return float((a @ b - exact).norm() / exact.norm())


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
    """torch's `scaled_dot_product_attention`: softmax(Q K^T scale) V, for [..., heads, tokens, width]. With masks,
    dropout or many tokens it is torch's own."""
    short = query.shape[-2] * key.shape[-2] <= LONGEST
    plain = attn_mask is None and dropout_p == 0 and not is_causal and not enable_gqa
    if not (short and plain and query.device.type == "cpu" and query.dtype == torch.float32):
        given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return _own(query, key, value, attn_mask, **given, enable_gqa=enable_gqa)
    scaled = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return (scaled @ key.transpose(-2, -1)).softmax(-1) @ value
