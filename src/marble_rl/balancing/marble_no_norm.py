"""The paper's ablation: MARBLE without normalised gradients (without steps 3 and 5). The paper reports that it
fails."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from marble_rl.balancing.direction import Direction, raw_direction
from marble_rl.balancing.harmonizer import Harmonizer
from marble_rl.balancing.marble import Marble, RefreshSettings


class MarbleNoNormSettings(RefreshSettings):
    """The paper's ablation: the quadratic program on gradients that are not normalised."""

    type: Literal["marble_no_norm"]
    apply: ClassVar[str] = "alpha"


class RawHarmonizer(Harmonizer):
    def direction(self, gram: Tensor) -> Direction:
        return raw_direction(gram)


class MarbleNoNorm(Marble):
    Settings = MarbleNoNormSettings
    label = "MARBLE, not normalised"
    about = "at once, balanced by MARBLE on gradients that are not normalised"
    harmonizer_class = RawHarmonizer

    @classmethod
    def never_opposes(cls, settings: Any) -> bool:
        return False
