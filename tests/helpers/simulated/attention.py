"""Attention as on a GPU: fused where the CPU's kernel is, else by products. torch asks a table of C++ kernels whether a
device has fused attention, which a device in Python cannot enter, so the choice is made here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from simulated.device import unwrap, wrap
from simulated.kernels import aten, library, run
from simulated.rules import check_devices


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    check_devices(aten._fused_sdp_choice.default, tensors.items())
    on_cpu = {name: unwrap(tensor).requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    options: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    choice = torch._fused_sdp_choice(**on_cpu, **options, enable_gqa=enable_gqa)
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return aten._scaled_dot_product_attention_math(**tensors, **options, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    return aten._scaled_dot_product_fused_attention_overrideable(query, key, value, attn_mask, **options)[0]


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    output, logsumexp = run(kernel, query, key, value, dropout_p, is_causal, attn_mask=attn_bias, scale=scale)
    seed = wrap(torch.zeros((), dtype=torch.long))
    return output, logsumexp, None, None, query.shape[2], key.shape[2], seed, seed.clone(), wrap(torch.empty(0))


def fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, wanted: Any, out: Tensor,
    logsumexp: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Any,
    offset: Any, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    tensors = (grad, query, key, value, out, logsumexp)
    return (*run(kernel, *tensors, dropout_p, is_causal, attn_mask=bias, scale=scale), None)


OWN = {
    "_scaled_dot_product_fused_attention_overrideable": fused,
    "_scaled_dot_product_fused_attention_overrideable_backward": fused_backward,
}


def register_attention() -> None:
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library().impl("scaled_dot_product_attention", attention, key)
