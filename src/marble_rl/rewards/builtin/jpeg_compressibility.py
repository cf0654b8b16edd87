"""How small an image becomes as a JPEG. The smallest example of a reward."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from PIL import Image

from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits


class JpegCompressibility(RewardBase):
    """Minus the JPEG size in bytes per pixel: smooth images score high, noise scores low. Below 0."""

    traits = Traits(range=(-math.inf, 0.0), deterministic=True)

    def __init__(self, quality: int = 95) -> None:
        self.quality = quality

    def score(self, batch: RewardBatch) -> Sequence[float]:
        return [-self._size(image) / (image.shape[0] * image.shape[1]) for image in batch.images]

    def _size(self, image: object) -> int:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=self.quality)  # type: ignore[arg-type]
        return buffer.tell()
