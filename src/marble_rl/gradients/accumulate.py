"""Stage 6: one policy gradient per reward, all on the same samples, noise and timesteps.

    g_k    = grad mean_i A_ki slope_i                         slope part: what the QP balances
    shared = grad mean_i base_i                               the same for every reward: stays outside the QP

Our choice: the gradient of ``base`` (a pull towards the old policy, zero on-policy) is not part of g_k. On-policy this
is the paper's method exactly.

Two methods give the same gradients. "fused": one backward pass for all columns (fused.py), through layers prepared by
`fuse`. "passes": one backward pass per column.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from marble_rl.distributed.world import World
from marble_rl.gradients.fused import ColumnSums
from marble_rl.gradients.halves import Halves, buffer_numbers
from marble_rl.gradients.products import Products, gram
from marble_rl.types import HALVES

Method = Literal["fused", "passes"]
_SPARE = 8
"""Room in the buffer for the caller's sums, in addition to one element per column"""


class FusedMismatch(RuntimeError):
    """A fused gradient differs from the same gradient computed alone."""

    def __init__(self, position: int, relative: float) -> None:
        super().__init__(
            f"the fused gradient of params[{position}] is off by {relative:.2g} of its length: some layer's leading "
            "dimension is not the sample. Use method='passes'"
        )
        self.position = position


@dataclass(frozen=True)
class _Checked:
    """A column whose fused gradient is compared with the same gradient computed alone."""

    cotangent: Tensor
    """[B]"""
    sums: Tensor
    """[P]: where the pass adds it"""
    before: Tensor
    """[P]: what was there before"""


@dataclass(frozen=True)
class RewardGradients:
    """Gradients of J columns of advantages, each flattened to P numbers in the order of ``params``."""

    g: Tensor
    """[J, P]: gradients of mean A_j * slope."""
    shared: Tensor
    """[P]: gradient of mean ``base``."""
    norms: Tensor
    """[J] float64: lengths of the rows of ``g``"""
    gram: Tensor
    """[J, J] float64: g g^T."""
    half_gram: Tensor | None
    """[2, 2, J, J] float64: products of the two halves' gradients; None if one half has no rows, or halves were not
    compared"""
    rest: Tensor | None = None
    """[J - columns, P]: the gradients that `first` left out"""
    by_passes: tuple[int, ...] = ()
    """Positions in ``params`` of parameters that no fused layer supports: they cost a backward pass per column."""
    reached: tuple[int, ...] = ()
    """Positions in ``params`` of parameters that the losses depend on"""

    @property
    def cross(self) -> Tensor | None:
        """[J, J] float64: M of halves.py, the unbiased products; None as ``half_gram``."""
        return None if self.half_gram is None else (self.half_gram[0, 1] + self.half_gram[1, 0]) / 2

    @property
    def products(self) -> Products:
        return Products(self.gram, self.half_gram)

    def first(self, columns: int) -> RewardGradients:
        """The first columns only, for example the rewards without the weighted-sum probe."""
        products = vars(self.products.first(columns))
        return replace(self, g=self.g[:columns], rest=self.g[columns:], norms=self.norms[:columns], **products)


class GradientAccumulator:
    """Sums per-column gradients over micro-batches and timesteps: add(...) as often as you like, then finish().

    A micro-batch costs one backward pass for all columns, and one for ``base``. Parameters that no fused layer supports
    cost one backward pass per column; a column of zeros is skipped. With J = 0 columns only ``base`` is
    differentiated: an ordinary step.

    ``verified``: sizes of micro-batches that need no check any more. In the first fused pass of every other size one
    column is compared with the same column computed alone, and the size is added. It costs a backward pass, and finds
    layers whose leading dimension has the size of the micro-batch but is not the sample. None checks nothing.
    ``lockstep``: make the same backward passes on all ranks, even for columns of zeros. A failed comparison is then
    raised by `sum_over`, which all ranks call.
    ``computed_in``: dtype of the model, which sets the tolerance of the comparison.
    ``halves_on``: the two halves of the prompt groups are compared on one in so many parameters; 0: not at all. It is
    cheap if a half's micro-batches follow each other, and hold no rows of the other.
    """

    def __init__(
        self,
        columns: int,
        params: Iterable[Tensor],
        method: Method = "fused",
        verified: set[int] | None = None,
        lockstep: bool = False,
        computed_in: torch.dtype = torch.float32,
        halves_on: int = 1,
    ) -> None:
        if method not in ("fused", "passes"):
            raise ValueError(f"method must be 'fused' or 'passes', got {method!r}")
        self.method = method
        self._verified = verified
        self._lockstep = lockstep
        # Relative error allowed for rounding, larger in half precision; a real mismatch has an error of about 1.
        self._tolerance = 0.05 if computed_in.itemsize >= torch.float32.itemsize else 0.3
        self._mismatch: FusedMismatch | None = None
        self.params = tuple(params)
        if not self.params:
            raise ValueError("params is empty: there is nothing to differentiate")
        self.columns = columns
        sizes = [p.numel() for p in self.params]
        numbers, count = sum(sizes), (columns + 1) * sum(sizes)
        gradients = buffer_numbers(columns, numbers, halves_on)
        # One buffer for one all-reduce: the gradients, the sample of the first half, which parameters they reach, the
        # number of rows of each half, and the caller's sums. Half precision could not count the rows.
        dtype = functools.reduce(torch.promote_types, {p.dtype for p in self.params}, torch.float32)
        self._buffer = torch.zeros(
            gradients + len(sizes) + HALVES + _SPARE + columns, dtype=dtype, device=self.params[0].device
        )
        # Row j is the gradient of column j; the last row is the shared part.
        self._sums = self._buffer[:count].view(columns + 1, numbers)
        self._views = [
            [chunk.view_as(p) for chunk, p in zip(row.split(sizes), self.params, strict=True)] for row in self._sums
        ]
        self._halves = None
        if gradients > count:
            self._halves = Halves(self._sums[:-1], self._buffer[count:gradients].view(columns, -1), halves_on)
        self._tail = self._buffer[gradients:]
        self._reached = self._tail[: len(sizes)]
        """[number of params]: above 0 for those that the losses depend on"""
        self._rows = [0] * HALVES
        self._by_passes: set[int] = set()
        self._finished = False

    def add(
        self,
        slope: Tensor | None,
        base: Tensor | None,
        advantages: Tensor | None,
        halves: Tensor | None = None,
    ) -> None:
        """Add the rows of one micro-batch: slope [B], base [B], advantages [B, J], halves [B] of 0 or 1."""
        if self._finished:
            raise ValueError("finish() was called, and its result lies in this accumulator's memory; make a new one")
        rows = slope if slope is not None else base
        if rows is None:
            raise ValueError("give slope, base or both")
        wanted = (len(rows), self.columns)
        if advantages is not None and tuple(advantages.shape) != wanted:
            raise ValueError(f"advantages must be {list(wanted)}, got {list(advantages.shape)}")
        half_of = torch.zeros(len(rows), dtype=torch.long) if halves is None else halves.to("cpu", torch.long)
        if half_of.shape != (len(rows),) or not ((half_of == 0) | (half_of == 1)).all():
            raise ValueError(f"halves must be [{len(rows)}] of 0 or 1, got {halves}")
        self.count(half_of)
        if slope is not None and advantages is not None:
            columns = advantages.detach().to(slope)
            if self._halves is None:
                self._add_columns(slope, columns)
            else:
                for half in half_of.unique().tolist():
                    self._halves.enter(half)
                    members = (half_of == half).to(columns)
                    self._add_columns(slope, columns if members.all() else columns * members[:, None])
        if base is not None:
            self._backward(base, torch.ones_like(base), range(len(self.params)), self._views[-1], keep=False)

    def count(self, halves: Tensor) -> None:
        """Count rows [B] of 0 or 1 in the means without adding to the sums: rows without a gradient need no pass."""
        for half in range(HALVES):
            self._rows[half] += int((halves == half).sum())

    def _add_columns(self, slope: Tensor, columns: Tensor) -> None:
        if self._can_skip(columns):
            return
        if self.method == "fused":
            self._one_pass(slope, columns)
        else:
            self._passes(slope, columns, range(len(self.params)))

    def sum_over(self, world: World, sums: Tensor) -> Tensor:
        """All-reduce the gradients, and ``sums`` [S] with them, in one call; returns those sums.

        The rows are counted in the gradients' dtype: exact up to 2^24 of them.
        """
        if self._mismatch is not None:
            raise self._mismatch
        if self._halves is not None:
            self._halves.enter(1)
        if world.size == 1:
            return sums
        counts = torch.tensor(self._rows, dtype=torch.float64)
        tail = self._tail[len(self.params) :]
        tail[: HALVES + len(sums)] = torch.cat([counts, sums.to(counts)]).to(tail)
        world.sum_(self._buffer)
        totals = tail[: HALVES + len(sums)].cpu().to(torch.float64)
        self._rows = [int(count) for count in totals[:HALVES]]
        return totals[HALVES:].to(sums)

    def finish(self) -> RewardGradients:
        """The mean gradients over all rows added, and their products.

        Call it once: the result reuses the accumulator's memory.
        """
        total = 0 if self._finished else sum(self._rows)
        if total == 0:
            raise ValueError("no rows were added")
        between = None if self._halves is None else self._halves.products(self._rows)
        products = Products(gram(self._sums[:-1]) / total**2, between)
        norms = products.gram.diagonal().clamp_min(0.0).sqrt()
        mean = self._sums.div_(total)
        self._finished = True
        by_passes = tuple(sorted(self._by_passes))
        reached = tuple(self._reached.nonzero().flatten().tolist())
        return RewardGradients(mean[:-1], mean[-1], norms, **vars(products), by_passes=by_passes, reached=reached)

    def _one_pass(self, slope: Tensor, columns: Tensor) -> None:
        """Fused layers add their gradients during the pass; autograd returns only those of unsupported parameters."""
        check = None
        if self._verified is not None and len(slope) not in self._verified:
            check = self._column_to_check(columns)
        sums = ColumnSums(self.params, len(slope), columns.T, self._sums[:-1])
        with sums.during_backward():
            rest = torch.autograd.grad(slope, self.params, torch.ones_like(slope), retain_graph=True, allow_unused=True)
        for i, p in enumerate(self.params):
            self._reached[i] += id(p) in sums.added
        unsupported = [i for i, gradient in enumerate(rest) if gradient is not None]
        if unsupported:
            self._by_passes.update(unsupported)
            with ColumnSums(self.params, len(slope)).during_backward():
                self._passes(slope, columns, unsupported)
        if check is not None and self._verified is not None:
            self._check_a_column(slope, check)
            self._verified.add(len(slope))

    def _column_to_check(self, columns: Tensor) -> _Checked:
        j = int(columns.norm(dim=0).argmax())
        return _Checked(columns[:, j], self._sums[j], self._sums[j].clone())

    def _check_a_column(self, slope: Tensor, check: _Checked) -> None:
        """Compare what the fused pass added to one column with the same column computed alone."""
        alone = torch.autograd.grad(slope, self.params, check.cotangent, retain_graph=True, allow_unused=True)
        added = check.sums - check.before
        whole = added.norm()
        parts = added.split([p.numel() for p in self.params])
        for i, (expected, flat) in enumerate(zip(alone, parts, strict=True)):
            fused = flat.view_as(self.params[i])
            error = fused.norm() if expected is None else (fused - expected).norm()
            # An overflow is not a mismatch: the caller checks for finite gradients.
            if torch.isfinite(error) and error > self._tolerance * (fused.norm() + 1e-3 * whole):
                self._mismatch = FusedMismatch(i, float(error / fused.norm().clamp_min(1e-30)))
                break
        if self._mismatch is not None and not self._lockstep:
            raise self._mismatch

    def _passes(self, slope: Tensor, columns: Tensor, which: Sequence[int]) -> None:
        """One backward pass per column, for the parameters at the positions ``which``."""
        for j in range(self.columns):
            if not self._can_skip(columns[:, j]):
                self._backward(slope, columns[:, j], which, self._views[j], keep=True)

    def _can_skip(self, cotangents: Tensor) -> bool:
        """Whether they are all zero, so that the backward pass can be left out. Never in lockstep."""
        return not self._lockstep and not bool(cotangents.count_nonzero())

    def _backward(
        self, output: Tensor, cotangent: Tensor | None, which: Sequence[int], into: list[Tensor], keep: bool
    ) -> None:
        params = [self.params[i] for i in which]
        gradients = torch.autograd.grad(output, params, cotangent, retain_graph=keep, allow_unused=True)
        for i, gradient in zip(which, gradients, strict=True):
            if gradient is not None:
                into[i] += gradient
                self._reached[i] = 1


def reward_gradients(
    slope: Tensor,
    base: Tensor | None,
    advantages: Tensor,
    params: Sequence[Tensor],
    *,
    halves: Tensor | None = None,
    method: Method = "fused",
) -> RewardGradients:
    """Per-reward gradients of one batch: slope [N], base [N], advantages [N, J] -> g [J, P], shared [P], products.

    J may exceed the number of rewards: further columns are probes. ``halves`` [N] of 0 or 1 says which half of the
    prompt groups a sample belongs to; without it ``half_gram`` is None. For "fused" call `fuse(model)` before the
    forward pass. Parameters that no fused layer supports cost one pass per column, and are listed in ``by_passes``.
    """
    if slope.ndim != 1 or advantages.ndim != 2 or len(advantages) != len(slope):
        raise ValueError(
            f"slope must be [N] and advantages [N, J], got {tuple(slope.shape)} and {tuple(advantages.shape)}"
        )
    accumulator = GradientAccumulator(advantages.shape[1], params, method, halves_on=int(halves is not None))
    accumulator.add(slope, base, advantages, halves)
    return accumulator.finish()
