"""Muon, an optimizer for matrices: the momentum is made orthogonal before it is applied.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). It needs fewer steps than AdamW
here. torch's implementation computes in bfloat16, which is slow on CPUs without hardware support.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial whose iteration drives all singular values towards 1."""
ITERATIONS = 5
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01


class Muon(torch.optim.Optimizer):
    """For matrices, and kernels of convolutions, which are taken for matrices with a row for each output channel. The
    learning rate is on AdamW's scale: an entry changes by about 0.2 of it in a step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = group["lr"]
            used = [p for p in group["params"] if p.grad is not None]
            for parameters, update in _same_shapes(used, [self._momentum(p) for p in used]):
                scale = 0.2 * max(update.shape[1:]) ** 0.5
                for parameter, direction in zip(parameters, orthogonal(update), strict=True):
                    parameter.mul_(1 - lr * WEIGHT_DECAY).add_(direction.view_as(parameter), alpha=-lr * scale)

    def _momentum(self, parameter: Tensor) -> Tensor:
        """Update the parameter's momentum; returns Nesterov's."""
        state = self.state[parameter]
        assert parameter.grad is not None
        momentum: Tensor = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(parameter.grad, 1 - MOMENTUM)
        return parameter.grad.lerp(momentum, MOMENTUM)


def _same_shapes(parameters: list[Tensor], updates: list[Tensor]) -> Iterable[tuple[list[Tensor], Tensor]]:
    """Parameters grouped by shape, with their updates stacked [n, rows, columns]."""
    shapes: dict[torch.Size, tuple[list[Tensor], list[Tensor]]] = {}
    for parameter, update in zip(parameters, updates, strict=True):
        members, stacked = shapes.setdefault(parameter.shape, ([], []))
        members.append(parameter)
        stacked.append(update.flatten(1))
    return [(members, torch.stack(stacked)) for members, stacked in shapes.values()]


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices to [n, rows, columns], approximately, by the Newton-Schulz iteration."""
    if matrices.shape[1] > matrices.shape[2]:
        upright: Tensor = orthogonal(matrices.mT).mT
        return upright
    a, b, c = COEFFICIENTS
    x: Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x
