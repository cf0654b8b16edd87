"""Short videos for tests: a ball that rolls through a scene."""

from __future__ import annotations

import numpy as np
import torch


def ball(frames: int = 13, height: int = 64, width: int = 64, seed: int = 0) -> torch.Tensor:
    """[F, H, W, 3] uint8. It moves by the same way in every frame; the scene has grain, which stays."""
    dice = np.random.default_rng(seed)
    ground, colour = dice.integers(60, 200, 3), dice.integers(0, 256, 3)
    scene = ground + dice.normal(0, 6, (height, width, 1))
    y, x = np.mgrid[:height, :width]
    video = []
    for t in range(frames):
        centre = width * (0.15 + 0.7 * t / max(1, frames - 1))
        inside = (x - centre) ** 2 + (y - height * 0.6) ** 2 < (0.15 * height) ** 2
        video.append(np.where(inside[..., None], colour, scene))
    return torch.from_numpy(np.stack(video).clip(0, 255).astype(np.uint8))
