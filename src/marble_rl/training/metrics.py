"""The metrics of one optimizer step, under the keys that docs/metrics.md explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marble_rl.balancing.base import Weighing
from marble_rl.gradients.accumulate import RewardGradients
from marble_rl.training.harmony import Harmony, Signal, harmony, in_batch_harmony, other_half_harmony
from marble_rl.types import Metrics, RewardTable


def reward_metrics(table: RewardTable, prefix: str = "reward") -> Metrics:
    """Mean of each reward over the samples that it applies to."""
    means = {f"{prefix}/{name}": table.mean(name) for name in table.names}
    return {key: mean for key, mean in means.items() if mean is not None}


def clip_metrics(scores: RewardTable, clipped: RewardTable) -> Metrics:
    """Fraction of scores that `clip` changed, for each reward with at least one changed score."""
    beyond = (scores.values != clipped.values).sum(0) / scores.applicable.sum(0).clamp_min(1)
    pairs = zip(scores.names, beyond.tolist(), strict=True)
    return {f"guard/clipped/{name}": share for name, share in pairs if share > 0}


def by_name(prefix: str, names: Sequence[str], values: Tensor) -> Metrics:
    """{prefix/name: value}, without values that are NaN."""
    pairs = zip(names, values.tolist(), strict=True)
    return {f"{prefix}/{name}": float(value) for name, value in pairs if value == value}


def refresh_metrics(
    names: Sequence[str],
    gradients: RewardGradients,
    weighing: Weighing,
    signal: Signal,
    rule: Callable[[Tensor], Tensor],
) -> Metrics:
    """The metrics of a refresh. The last column of the gradients is the weighted-sum probe. ``rule`` computes the
    balancing rule's weights [K] from a Gram matrix [K, K]."""
    k = len(names)
    gram, half_gram, elsewhere = gradients.gram.cpu(), gradients.half_gram, weighing.elsewhere
    metrics = {**weighing.figures, **by_name("grad_norm", names, gradients.norms[:k])}
    if half_gram is not None or elsewhere is not None:
        metrics |= by_name("signal", names, signal.share)

    def ours(g: Tensor) -> Tensor:
        return torch.cat([rule(g[:k, :k]), torch.zeros(1)])

    def weighted_sum(g: Tensor) -> Tensor:
        return torch.eye(k + 1, dtype=g.dtype)[k]

    for place, (prefix, weights) in enumerate((("", ours), ("ws_", weighted_sum))):
        metrics |= _harmony(f"{prefix}harmony", in_batch_harmony(gram, weights(gram), k))
        if elsewhere is not None:
            squares = gram.diagonal()[:k]
            there = harmony(elsewhere.directions[place], squares, elsewhere.squared_norms[place])
            metrics |= _harmony(f"{prefix}heldout", there)
        elif half_gram is not None:
            metrics |= _harmony(f"{prefix}heldout", other_half_harmony(half_gram.cpu(), weights, k))
    return metrics


def _harmony(prefix: str, figures: Harmony | None) -> Metrics:
    return {} if figures is None else {f"{prefix}/{key}": value for key, value in vars(figures).items()}
