"""How small an image becomes as a JPEG. The smallest example of a reward."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Annotated

from PIL import Image
from pydantic import Field

from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits
from marble_rl.section import Section


class JpegCompressibility(RewardBase):
    """Minus the JPEG size in bytes per pixel: smooth images score high, noise scores low. Below 0."""

    class Params(Section):
        quality: Annotated[int, Field(ge=1, le=100)] = 95
        """Of the JPEG, from 1 to 100; the higher, the more fine detail counts."""

    params: Params
    traits = Traits(range=(-math.inf, 0.0), deterministic=True)

    def score(self, batch: RewardBatch) -> Sequence[float]:
        return [-self._size(image) / (image.shape[0] * image.shape[1]) for image in batch.images]

    def _size(self, image: object) -> int:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=self.params.quality)  # type: ignore[arg-type]
        return buffer.tell()
