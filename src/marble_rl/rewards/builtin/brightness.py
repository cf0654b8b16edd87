"""Mean brightness of an image."""

from __future__ import annotations

from collections.abc import Sequence

from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits
from marble_rl.section import Fraction, Section


class Brightness(RewardBase):
    """Mean of all pixels in [0, 1]; with ``target`` minus the distance to it."""

    class Params(Section):
        target: Fraction | None = None
        """The brightness wanted, from 0 to 1; null: the brighter the better."""

    params: Params
    traits = Traits(range=(-1.0, 1.0), deterministic=True)

    def score(self, batch: RewardBatch) -> Sequence[float]:
        means = batch.images.mean(axis=(1, 2, 3)) / 255.0
        target = self.params.target
        return [float(mean) if target is None else -abs(float(mean) - target) for mean in means]
