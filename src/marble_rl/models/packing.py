"""FLUX and Qwen-Image take a 2x2 block of a latent as one token. Everywhere else a latent is [B, C, H, W]."""

from __future__ import annotations

from torch import Tensor

PATCH = 2
"""Side of a block: latent positions per token, in each direction."""


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] to tokens [B, H/2 * W/2, 4 C]: channel by channel, the four positions of a block."""
    blocks: Tensor = latents.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens back to a latent [B, C, height, width]."""
    grid: Tensor = tokens.unflatten(1, (height // PATCH, width // PATCH)).unflatten(3, (-1, PATCH, PATCH))
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
