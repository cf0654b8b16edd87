"""One gradient per reward from K scalar losses, in place of per-sample slopes and advantages.

It fits losses that are not affine in the advantage, such as those with clipped ratios.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marble_rl.gradients.accumulate import GradientAccumulator
from marble_rl.types import HALVES


class LossAccumulator(GradientAccumulator):
    """Also takes scalar losses: add_losses(...) for each micro-batch, then finish()."""

    def add_losses(self, losses: Sequence[Tensor], shared: Tensor | None, through: Tensor | None = None) -> None:
        """Add one micro-batch of J losses, scalars, in place of rows; ``shared`` is one that all columns share.

        Losses of several micro-batches add up, over ranks they are averaged. Losses without a gradient add nothing.
        ``through``: numbers [B], one per sample, that each loss is a function of. The chain rule makes them rows:
        grad L_j = sum_b (dL_j / d through_b) grad through_b, which is one backward pass through fused layers.
        """
        self._rows = [1] + [0] * (HALVES - 1)
        work = [(loss, self._views[j]) for j, loss in enumerate(losses) if loss.requires_grad]
        if through is not None and work:
            self._add_through(through, losses)
            work = []
        if shared is not None and shared.requires_grad:
            work.append((shared, self._views[-1]))
        for i, (loss, into) in enumerate(work):
            self._backward(loss, None, range(len(self.params)), into, keep=i < len(work) - 1)

    def _add_through(self, through: Tensor, losses: Sequence[Tensor]) -> None:
        if through.ndim != 1 or not through.requires_grad:
            raise ValueError(f"through must be numbers [N], one per sample, with a gradient; got {list(through.shape)}")
        columns = torch.zeros(len(through), self.columns, dtype=through.dtype, device=through.device)
        for j, loss in enumerate(losses):
            if loss.requires_grad:
                (column,) = torch.autograd.grad(loss, through, retain_graph=True, allow_unused=True)
                columns[:, j] = 0.0 if column is None else column
        if any(goes_around(loss, through) for loss in losses):
            raise ValueError(
                "a loss depends on parameters in other ways than by `through`, and that part would be lost. Give a "
                "term that all rewards share as `shared`, or leave `through` out"
            )
        if not self._can_skip(columns):
            self._one_pass(through, columns)


def goes_around(loss: Tensor, through: Tensor) -> bool:
    """Whether the graph of a loss reaches a leaf, such as a parameter, without passing ``through``."""
    todo, seen = [loss.grad_fn], {None, through.grad_fn}
    while todo:
        node = todo.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # where the gradient of a leaf is accumulated
            return True
        todo += [parent for parent, _ in node.next_functions]
    return False
