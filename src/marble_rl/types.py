"""The records that pass between the stages of a training step, with their shapes.

N samples, G prompt groups, S images in each group, K rewards. A rollout has N = G S samples. In records that hold only
this rank's share of a rollout, N counts that share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

ConditioningT = TypeVar("ConditioningT", bound="Conditioning")

Metrics = dict[str, float]
"""The metrics of one optimizer step, by key (docs/metrics.md)."""
Media = Literal["image", "video"]

HALVES = 2
"""The prompt groups of an update are divided into two halves. Their gradients are independent estimates."""


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    index: int
    """Position in the prompt set; advantages are grouped by it. Two prompts with the same text stay distinct."""
    text: str
    source: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rewards: frozenset[str] | None = None
    """Names of the rewards that apply, if the prompt file lists them; None leaves the decision to each reward."""


@dataclass(frozen=True)
class Group:
    """One prompt of a rollout, its place in the rollout, and the update that trains on its images."""

    slot: int
    """Position in the rollout, 0..G-1."""
    prompt: Prompt
    update: int
    """Which of the rollout's optimizer updates trains on it."""
    half: int
    """0 or 1: which half of that update's groups it belongs to."""


@dataclass(frozen=True)
class Conditioning:
    """A model's encoding of the prompts: tensors whose leading dimension is the prompt or the sample."""

    def rows(self: ConditioningT, index: Tensor | slice) -> ConditioningT:
        return self._map(lambda x: x[index])

    def repeat(self: ConditioningT, times: int) -> ConditioningT:
        return self._map(lambda x: x.repeat_interleave(times, dim=0))

    def to(self: ConditioningT, device: torch.device) -> ConditioningT:
        return self._map(lambda x: x.to(device))

    def trimmed(self: ConditioningT) -> ConditioningT:
        """Without the padding that is common to all rows; for one forward pass."""
        return self

    @property
    def bytes(self) -> int:
        """Size in memory."""
        tensors = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    @classmethod
    def cat(cls: type[ConditioningT], items: Sequence[ConditioningT]) -> ConditioningT:
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**{name: torch.cat([getattr(item, name) for item in items]) for name in names})

    def _map(self: ConditioningT, function: Any) -> ConditioningT:
        return type(self)(**{f.name: function(getattr(self, f.name)) for f in dataclasses.fields(self)})


@dataclass(frozen=True)
class Rollout:
    """Images of the old policy, in the order of their groups: sample s of the i-th group is row i * S + s.

    Each rank holds only the groups that it sampled. The score table holds the samples of all ranks, in slot order.
    """

    groups: tuple[Group, ...]
    """The groups sampled on this rank, in slot order"""
    drawn: tuple[Group, ...]
    """The groups of all ranks, in slot order"""
    group_size: int
    x0: Tensor
    """[N, C, H, W] clean latents of this rank; for videos [N, C, F, H, W]"""
    images: Tensor
    """[N, H, W, 3] uint8 on the CPU; for videos [N, F, H, W, 3]"""
    conditioning: Conditioning
    """One row for each of ``groups``: this rank's groups."""
    sigmas: Tensor
    """[T + 1] noise levels of the sampling steps, descending, the last one 0"""

    def update_rows(self, update: int) -> list[int]:
        """This rank's rows for the rollout's ``update``-th optimizer update (they are consecutive)."""
        return self._rows([i for i, group in enumerate(self.groups) if group.update == update])

    def table_rows(self, update: int, all_ranks: bool = False) -> list[int]:
        """The rows of the score table for the same samples; with ``all_ranks``, for the update's samples on all
        ranks (they are consecutive)."""
        groups = self.drawn if all_ranks else self.groups
        return self._rows([group.slot for group in groups if group.update == update])

    def _rows(self, groups: Sequence[int]) -> list[int]:
        return [group * self.group_size + sample for group in groups for sample in range(self.group_size)]


@dataclass(frozen=True)
class RewardTable:
    """Scores of N samples by K rewards."""

    names: tuple[str, ...]
    values: Tensor
    """[N, K] float64, higher is better; 0 where a reward does not apply"""
    applicable: Tensor
    """[N, K] bool"""

    def columns(self, names: Sequence[str]) -> RewardTable:
        """The table of these rewards alone."""
        chosen = [self.names.index(name) for name in names]
        return RewardTable(tuple(names), self.values[:, chosen], self.applicable[:, chosen])

    def rows(self, rows: Sequence[int]) -> RewardTable:
        return RewardTable(self.names, self.values[rows], self.applicable[rows])

    def mean(self, name: str) -> float | None:
        """Mean over the samples that the reward applies to; None if there are none."""
        column = self.names.index(name)
        scores = self.values[self.applicable[:, column], column]
        return float(scores.mean()) if len(scores) else None
