"""Stage 4: one advantage estimator per reward.

    A_k(x) = (R_k(x) - mu_k(prompt)) / (sigma_k(prompt) + 1e-4)                  (docs/method.md, section 3, step 1)

Our choices, which the paper leaves open: statistics are in float64, with the population std. A is exactly 0 where the
group is constant (std <= 1e-6 max(1, |mean|)), where the reward applies to fewer than two samples of the group, and
where it does not apply. ``std="global"`` divides by one std per reward: that of the *group-centred* rewards of the
whole rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marble_rl.types import RewardTable

EPSILON = 1e-4
CONSTANT_GROUP = 1e-6
LARGEST = 1e100
"""Scores whose squares can be summed"""


def group_advantages(
    values: Tensor,
    group_ids: Tensor,
    applicable: Tensor | None = None,
    std: Literal["group", "global"] = "group",
) -> Tensor:
    """Advantages [N, K] of rewards [N, K] within prompt groups [N].

    ``applicable`` [N, K] bool marks the rewards that apply to a sample; other entries are ignored.
    """
    if values.ndim != 2 or group_ids.shape != values.shape[:1]:
        raise ValueError(
            f"values must be [N, K] and group_ids [N], got {tuple(values.shape)} and {tuple(group_ids.shape)}"
        )
    valid = torch.ones_like(values, dtype=torch.bool) if applicable is None else applicable.bool()
    if valid.shape != values.shape:
        raise ValueError(f"applicable must be {tuple(values.shape)} like values, got {tuple(valid.shape)}")
    if std not in ("group", "global"):
        raise ValueError(f"std must be 'group' or 'global', got {std!r}")
    scores = values.to(torch.float64).masked_fill(~valid, 0.0)
    if not torch.isfinite(scores).all():
        raise ValueError("values holds NaN or infinite rewards; use `applicable` to say that a reward does not apply")

    # In units in which squares do not overflow. They are 1 for all but absurd scores, which loses no bit.
    largest = scores.abs().amax(0) if len(scores) else scores.new_zeros(scores.shape[1])
    unit = torch.where(largest > LARGEST, largest, 1.0)
    scores = scores / unit
    _, group = torch.unique(group_ids, return_inverse=True)
    count = _group_sum(valid.to(torch.float64), group)
    mean = _group_sum(scores, group) / count.clamp_min(1.0)
    centred = (scores - mean[group]).masked_fill(~valid, 0.0)
    deviation = (_group_sum(centred**2, group) / count.clamp_min(1.0)).sqrt()
    informative = (count >= 2) & (deviation > CONSTANT_GROUP * mean.abs().clamp_min(1 / unit))

    if std == "group":
        scale = deviation[group]
    else:
        scale = ((centred**2).sum(0) / valid.sum(0).clamp_min(1)).sqrt().expand_as(centred)
    advantages = torch.where(informative[group] & valid, centred / (scale + EPSILON / unit), 0.0)
    return advantages.to(values.dtype if values.is_floating_point() else torch.float64)


def second_moments(advantages: Tensor) -> Tensor:
    """[K, K] float64: mean_i A_ki A_li of advantages [N, K]."""
    a = advantages.to("cpu", torch.float64)
    return a.T @ a / len(a)


def _group_sum(rows: Tensor, group: Tensor) -> Tensor:
    """Sum the rows [N, K] of each group: [G, K]."""
    total = rows.new_zeros(int(group.max()) + 1 if len(group) else 0, rows.shape[1])
    return total.index_add_(0, group, rows)


@dataclass(frozen=True)
class Scored:
    """Scores and advantages of all samples of a rollout, on all ranks: the input of `Balancer.combine`."""

    table: RewardTable
    group_ids: Tensor
    """[N]"""
    advantages: Tensor
    """[N, K], each clamped to +-A_max"""
    std: Literal["group", "global"]
    adv_clip: float

    @property
    def rated(self) -> Tensor:
        """[N] bool: at least one reward applies to the sample."""
        return self.table.applicable.any(dim=1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Advantage [N] of the scalar reward sum_k w_k R_k over the rewards that apply to a sample."""
        scalar = self.table.values.masked_fill(~self.table.applicable, 0.0) @ weights.to(self.table.values)
        advantage = group_advantages(scalar[:, None], self.group_ids, self.rated[:, None], self.std)[:, 0]
        return advantage.clamp(-self.adv_clip, self.adv_clip)
