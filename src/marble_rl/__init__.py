"""marble: fine-tune a diffusion or flow-matching model on many rewards at once, without reward weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from marble_rl.advantages import group_advantages
    from marble_rl.balancing.fair_harmonizer import FairHarmonizer, FairShares
    from marble_rl.balancing.harmonizer import Coefficients, Harmonizer
    from marble_rl.balancing.min_norm import MinNorm, min_norm
    from marble_rl.config import RunConfig, load_config
    from marble_rl.gradients.accumulate import GradientAccumulator, RewardGradients, reward_gradients
    from marble_rl.gradients.fused import fuse
    from marble_rl.losses.base import AffineLoss
    from marble_rl.losses.nft import nft_loss
    from marble_rl.training.trainer import RunResult, Trainer
    from marble_rl.types import RewardTable

_HOME = {
    "AffineLoss": "marble_rl.losses.base",
    "Coefficients": "marble_rl.balancing.harmonizer",
    "FairHarmonizer": "marble_rl.balancing.fair_harmonizer",
    "FairShares": "marble_rl.balancing.fair_harmonizer",
    "GradientAccumulator": "marble_rl.gradients.accumulate",
    "Harmonizer": "marble_rl.balancing.harmonizer",
    "MinNorm": "marble_rl.balancing.min_norm",
    "RewardGradients": "marble_rl.gradients.accumulate",
    "RewardTable": "marble_rl.types",
    "RunConfig": "marble_rl.config",
    "RunResult": "marble_rl.training.trainer",
    "Trainer": "marble_rl.training.trainer",
    "fuse": "marble_rl.gradients.fused",
    "group_advantages": "marble_rl.advantages",
    "load_config": "marble_rl.config",
    "min_norm": "marble_rl.balancing.min_norm",
    "nft_loss": "marble_rl.losses.nft",
    "reward_gradients": "marble_rl.gradients.accumulate",
}
"""Public names and where they live. They are imported on first use: `import marble_rl` itself costs nothing."""

__all__ = [
    "AffineLoss",
    "Coefficients",
    "FairHarmonizer",
    "FairShares",
    "GradientAccumulator",
    "Harmonizer",
    "MinNorm",
    "RewardGradients",
    "RewardTable",
    "RunConfig",
    "RunResult",
    "Trainer",
    "fuse",
    "group_advantages",
    "load_config",
    "min_norm",
    "nft_loss",
    "reward_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'marble_rl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
