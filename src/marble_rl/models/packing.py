"""FLUX and Qwen-Image see 2x2 blocks of a latent as one token; between the calls a latent stays an image."""

from __future__ import annotations

from torch import Tensor

PATCH = 2
"""Latent positions to a token, each way."""


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] to tokens [B, H/2 * W/2, 4 C], a block's four positions beside each other in every channel."""
    blocks: Tensor = latents.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens back to a latent [B, C, height, width]."""
    grid: Tensor = tokens.unflatten(1, (height // PATCH, width // PATCH)).unflatten(3, (-1, PATCH, PATCH))
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
