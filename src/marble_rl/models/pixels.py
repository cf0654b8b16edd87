"""From an autoencoder's output to images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from marble_rl.errors import NonFinite

AT_ONCE = 8
"""Images that are decoded in one pass. More are slower on a CPU, whose caches they leave, and take memory."""


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Pixels in float32, whatever dtype the autoencoder computes in; ``latents`` are in the autoencoder's scale."""
    parts: list[Tensor] = [
        vae.decode(part, return_dict=False)[0].float() for part in latents.to(vae.dtype).split(AT_ONCE)
    ]
    return torch.cat(parts)


UNDECODED = (
    "decoding produced pixels that are not finite. Half precision overflows in many autoencoders: set model.vae_dtype: "
    "float32. If it is float32 already, the weights have diverged: lower optimizer.lr"
)


class NonFinitePixels(NonFinite):
    """The autoencoder overflowed. ``images``: black, of the right shape, for a rank in lockstep, which continues."""

    def __init__(self, images: Tensor) -> None:
        super().__init__(UNDECODED)
        self.images = images


def to_uint8(pixels: Tensor) -> Tensor:
    """Convert an autoencoder's pixels [B, 3, ...] in [-1, 1] to [B, ..., 3] in 0..255, on the CPU."""
    if not all_finite(pixels):
        # Converted to uint8, they would be scored like any other image.
        raise NonFinitePixels(_rounded(torch.zeros_like(pixels)))
    return _rounded(pixels)


def all_finite(pixels: Tensor) -> bool:
    """Checks the smallest and largest pixel only: `isfinite` of every pixel would allocate a tensor of that size."""
    return bool(torch.stack(pixels.aminmax()).isfinite().all())


def _rounded(pixels: Tensor) -> Tensor:
    unit = (pixels / 2 + 0.5).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).movedim(1, -1).contiguous().cpu()


def per_channel(latents: Tensor, vae: Any) -> Tensor:
    """Latents [B, C, F, H, W] in the scale of an autoencoder with a mean and a standard deviation for each channel."""
    mean, std = (
        torch.tensor(values, device=latents.device).view(-1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents * std + mean
