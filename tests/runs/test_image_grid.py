"""The grid of a rollout."""

from __future__ import annotations

import torch

from marble_rl.runs.images import image_grid


def test_image_grid() -> None:
    black, white = torch.zeros(3, 16, 16, 3, dtype=torch.uint8), torch.full((1, 16, 16, 3), 255, dtype=torch.uint8)
    (grid,) = image_grid([("a very long prompt " * 30, black), ("", white)]).frames
    assert grid.width == 3 * (96 + 6) + 6
    assert grid.getpixel((20, 60)) == (0, 0, 0)
