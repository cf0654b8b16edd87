"""All per-reward gradients from one backward pass (docs/method.md, section 4).

The cotangent of sample i under advantage column j is A_ij s_i, with s_i = d slope_i / d v. Back-propagation is linear
in the cotangent and samples do not mix, so at a linear layer y = x W^T with input x [B, ..., in]

    dW_j = sum_i A_ij P_i,      P_i = sum over the tokens of grad_y_i^T x_i  under the cotangent s.

One pass over s gives every P_i, hence all J gradients; each layer adds its weighted P_i and frees them. This happens
in the
layers' own backward functions, not in hooks, so activation checkpointing, autocast and dropout work as usual.

What these layers do not support (DoRA's products of weights, convolutions, a leading dimension that is not the sample)
comes out of the same backward pass as an ordinary gradient. The caller sees it there and
computes it with one backward pass per column, so no gradient is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SCRATCH = 1 << 24
"""Maximum number of elements of per-sample gradients that a layer holds at once."""


def fuse(model: nn.Module) -> int:
    """Let one backward pass through ``model`` give the gradients of many rewards; returns the number of fused layers.

    Call it after adapters are attached, with the trained adapter active. Every `nn.Linear`, `nn.LayerNorm` and
    `nn.RMSNorm` that has a parameter to train becomes its fused counterpart: the same weights, the same outputs.
    """
    fused = 0
    for module in model.modules():
        kind = _FUSED.get(type(module))
        if kind is not None and any(p.requires_grad for p in module.parameters(recurse=False)):
            module.__class__ = kind
        fused += isinstance(module, tuple(_FUSED.values()))
    return fused


class Mixing:
    """Receives sum_i A_ij P_i from the fused layers during a backward pass.

    ``columns`` pairs coefficients A^T [J, B] with the rows [J, P] of a flat buffer that they are added to. If it is
    empty, the gradients of fused layers are discarded and only unsupported parameters get one.
    """

    def __init__(self, params: Sequence[Tensor], batch: int, columns: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.batch = batch
        self._columns = columns
        self._places: dict[int, slice] = {}
        start = 0
        for p in params:
            self._places[id(p)] = slice(start, start + p.numel())
            start += p.numel()

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Fused layers use this object in backward passes inside the block, on every autograd thread."""
        global _mixing
        with _ONE_AT_A_TIME:
            _mixing = self
            try:
                yield
            finally:
                _mixing = None

    def serves(self, parameter: int | None, grad_output: Tensor) -> bool:
        """Whether a parameter is one of ``params``, and the layer's leading dimension is the sample."""
        return parameter in self._places and grad_output.ndim > 1 and len(grad_output) == self.batch

    def add(self, parameter: int, per_sample: Tensor, first: int = 0) -> None:
        """Add the weighted per-sample gradients [b, n]; the first of them belongs to sample ``first``."""
        place = self._places[parameter]
        for coefficients, rows in self._columns:
            part = coefficients[:, first : first + len(per_sample)]
            rows[:, place].addmm_(part.to(rows), per_sample.to(rows))


_mixing: Mixing | None = None
# Not a thread-local: autograd runs the backward pass of each GPU on a thread of its own.
_ONE_AT_A_TIME = threading.Lock()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.keys = id(weight), None if bias is None else id(bias)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        weight_key, bias_key = ctx.keys
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = (grad_y @ weight).to(x_dtype)
        mixing = _mixing
        if needs_weight:
            if mixing is not None and mixing.serves(weight_key, grad_y):
                _mix_products(mixing, weight_key, grad_y, x)
            else:
                grad_weight = (grad_y.flatten(0, -2).T @ x.flatten(0, -2)).to(weight_dtype)
        if needs_bias:
            if mixing is not None and mixing.serves(bias_key, grad_y):
                mixing.add(bias_key, grad_y.reshape(len(grad_y), -1, grad_y.shape[-1]).sum(1))
            else:
                grad_bias = grad_y.flatten(0, -2).sum(0).to(bias_dtype)
        return grad_x, grad_weight, grad_bias


def _mix_products(mixing: Mixing, parameter: int, grad_y: Tensor, x: Tensor) -> None:
    """P_i = grad_y_i^T x_i, for as many samples at once as the scratch space holds."""
    rows_y = grad_y.reshape(len(grad_y), -1, grad_y.shape[-1])
    rows_x = x.reshape(len(x), -1, x.shape[-1])
    at_once = max(1, SCRATCH // (rows_y.shape[-1] * rows_x.shape[-1]))
    for first in range(0, len(rows_y), at_once):
        some = slice(first, first + at_once)
        mixing.add(parameter, torch.bmm(rows_y[some].transpose(1, 2), rows_x[some]).flatten(1), first)


class _Affine(torch.autograd.Function):
    """x * weight + bias over the trailing dimensions, as norm layers end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.keys = id(weight), None if bias is None else id(bias)
        ctx.save_for_backward(x, weight)
        scaled = x * weight
        return scaled if bias is None else scaled + bias

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad
        grad_x = (grad_y * weight).to(x.dtype) if needs_x else None
        grads: list[Tensor | None] = [None, None]
        mixing = _mixing
        for i, key in enumerate(ctx.keys):
            if not needs[i]:
                continue
            terms = grad_y * x if i == 0 else grad_y
            if mixing is not None and terms.ndim > weight.ndim and mixing.serves(key, terms):
                mixing.add(key, terms.reshape(len(terms), -1, weight.numel()).sum(1))
            else:
                grads[i] = terms.reshape(-1, *weight.shape).sum(0).to(weight.dtype)
        return grad_x, *grads


class FusedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not _trains(self) or input.ndim < 2:  # a vector has no samples to tell apart
            return super().forward(input)
        output: Tensor = _Linear.apply(input, self.weight, self.bias)
        return output


class FusedLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not _trains(self):
            return super().forward(input)
        normed = nn.functional.layer_norm(input, self.normalized_shape, eps=self.eps)
        output: Tensor = _Affine.apply(normed, self.weight, self.bias)
        return output


class FusedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if not _trains(self):
            return super().forward(x)
        normed = nn.functional.rms_norm(x, list(self.normalized_shape), eps=self.eps)
        output: Tensor = _Affine.apply(normed, self.weight, None)
        return output


def _trains(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(recurse=False))


_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FusedLinear,
    nn.LayerNorm: FusedLayerNorm,
    nn.RMSNorm: FusedRMSNorm,
}
