"""All per-reward gradients from one backward pass (docs/method.md, section 4).

For advantage column j, the cotangent of sample i is A_ji s_i, with s_i = d slope_i / d v. Back-propagation is linear in
the cotangent, and the samples of a batch do not interact. So at a linear layer y = x W^T with input x [B, ..., in]

    dW_j = sum_i A_ji P_i,      P_i = sum over the tokens of grad_y_i^T x_i  under the cotangent s.

P_i is the gradient of slope_i. One backward pass with the cotangent s gives every P_i. Each layer adds sum_i A_ji P_i
to the J gradients and frees the P_i. The layers do this in their own backward functions, not in hooks, so activation
checkpointing, autocast and dropout work as usual.

These layers do not support DoRA's products of weights, convolutions, and inputs whose leading dimension is not the
sample. The same backward pass returns ordinary gradients for such parameters. That tells the caller to compute them
with one backward pass per column.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SCRATCH = 1 << 24
"""Most elements of per-sample gradients that a layer holds at once"""


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


class ColumnSums:
    """Collects sum_i A_ji P_i, for each column j, from the fused layers during a backward pass.

    ``advantages`` [J, B], ``buffer`` [J, P]: what the gradients are added to (P: number of parameters). Without a
    buffer fused layers discard their gradients, and only unsupported parameters get one.
    """

    def __init__(
        self, params: Sequence[Tensor], batch: int, advantages: Tensor | None = None, buffer: Tensor | None = None
    ) -> None:
        self.batch = batch
        self.added: set[int] = set()
        """ids of the parameters that gradients were added for"""
        self._advantages = advantages
        self._buffer = buffer
        self._places: dict[int, slice] = {}
        start = 0
        for p in params:
            self._places[id(p)] = slice(start, start + p.numel())
            start += p.numel()

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Fused layers use this object in backward passes inside the block, on every autograd thread."""
        global _active_sums
        with _ONE_AT_A_TIME:
            _active_sums = self
            try:
                yield
            finally:
                _active_sums = None

    def supports(self, parameter: int | None, grad_output: Tensor) -> bool:
        """Whether the parameter is one of ``params``, and the leading dimension has the size of the batch."""
        return parameter in self._places and grad_output.ndim > 1 and len(grad_output) == self.batch

    def add(self, parameter: int, per_sample: Tensor, first: int = 0) -> None:
        """Add per-sample gradients [b, n] of samples ``first``, ``first + 1``, ..., weighted by the advantages."""
        place = self._places[parameter]
        self.added.add(parameter)
        if self._advantages is not None and self._buffer is not None:
            part = self._advantages[:, first : first + len(per_sample)]
            self._buffer[:, place].addmm_(part.to(self._buffer), per_sample.to(self._buffer))


_active_sums: ColumnSums | None = None
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
        sums = _active_sums
        if needs_weight:
            if sums is not None and sums.supports(weight_key, grad_y):
                _add_products(sums, weight_key, grad_y, x)
            else:
                grad_weight = (grad_y.flatten(0, -2).T @ x.flatten(0, -2)).to(weight_dtype)
        if needs_bias:
            if sums is not None and sums.supports(bias_key, grad_y):
                sums.add(bias_key, grad_y.reshape(len(grad_y), -1, grad_y.shape[-1]).sum(1))
            else:
                grad_bias = grad_y.flatten(0, -2).sum(0).to(bias_dtype)
        return grad_x, grad_weight, grad_bias


def _add_products(sums: ColumnSums, parameter: int, grad_y: Tensor, x: Tensor) -> None:
    """Add P_i = grad_y_i^T x_i, for at most `SCRATCH` elements at once."""
    rows_y = grad_y.reshape(len(grad_y), -1, grad_y.shape[-1])
    rows_x = x.reshape(len(x), -1, x.shape[-1])
    at_once = max(1, SCRATCH // (rows_y.shape[-1] * rows_x.shape[-1]))
    for first in range(0, len(rows_y), at_once):
        some = slice(first, first + at_once)
        sums.add(parameter, torch.bmm(rows_y[some].transpose(1, 2), rows_x[some]).flatten(1), first)


class _Affine(torch.autograd.Function):
    """x * weight + bias over the trailing dimensions: the last operation of a norm layer."""

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
        sums = _active_sums
        for i, key in enumerate(ctx.keys):
            if not needs[i]:
                continue
            terms = grad_y * x if i == 0 else grad_y
            if sums is not None and terms.ndim > weight.ndim and sums.supports(key, terms):
                sums.add(key, terms.reshape(len(terms), -1, weight.numel()).sum(1))
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
