"""Mean brightness of an image."""

from __future__ import annotations

from collections.abc import Sequence

from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits


class Brightness(RewardBase):
    """Mean of all pixels in [0, 1]; with ``target`` minus the distance to it."""

    traits = Traits(range=(-1.0, 1.0), deterministic=True)

    def __init__(self, target: float | None = None) -> None:
        self.target = target

    def score(self, batch: RewardBatch) -> Sequence[float]:
        means = batch.images.mean(axis=(1, 2, 3)) / 255.0
        return [float(m) if self.target is None else -abs(float(m) - self.target) for m in means]
