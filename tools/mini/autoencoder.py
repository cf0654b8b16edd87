"""The mini pipeline's VAE: 64x64 pictures to 16x16 latents with 8 channels, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marble_rl.mini.shapes import SIZE
from marble_rl.seeding import generator
from tools.mini.corpus import Pictures
from tools.mini.schedule import rise_and_fall

LATENT_CHANNELS = 8
FACTOR = 4
KL_WEIGHT = 1e-6
EDGE_WEIGHT = 0.5
CROP = 32
"""Side of the crops it is trained on. It has no attention, so crops teach as much at a quarter of the cost."""


def new_autoencoder(seed: int) -> Any:
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 32, 48),
            layers_per_block=1,
            norm_num_groups=8,
            latent_channels=LATENT_CHANNELS,
            sample_size=SIZE,
            scaling_factor=1.0,
            shift_factor=0.0,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        )


def as_tensor(images: Pictures) -> Tensor:
    """uint8 [N, H, W, 3] -> float [N, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_autoencoder(
    images: Pictures,
    *,
    steps: int,
    batch: int,
    seed: int,
    lr: float = 2e-3,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Any:
    """Train on pixels and on differences between neighbours, which keeps edges sharp; then set the latents' scale and
    shift."""
    vae = new_autoencoder(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, weight_decay=1e-4)
    schedule = rise_and_fall(optimizer, lr, steps)
    for step in range(steps):
        dice = generator(seed, "autoencoder", step)
        rows = torch.randint(len(images), (batch,), generator=dice)
        target = as_tensor(images[rows.numpy()][(slice(None), *_crop(dice))])
        posterior = vae.encode(target).latent_dist
        latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=dice)
        output = vae.decode(latents).sample
        loss = _reconstruction(output, target) + KL_WEIGHT * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step, loss.item())
    _standardise(vae, images[: 64 * batch], batch)
    return vae.eval()


def _crop(dice: torch.Generator) -> tuple[slice, slice]:
    """A random crop, aligned to the grid of the latents."""
    top, left = (FACTOR * torch.randint((SIZE - CROP) // FACTOR + 1, (2,), generator=dice)).tolist()
    return slice(top, top + CROP), slice(left, left + CROP)


def _reconstruction(output: Tensor, target: Tensor) -> Tensor:
    edges = sum(F.l1_loss(output.diff(dim=d), target.diff(dim=d)) for d in (2, 3))
    return F.l1_loss(output, target) + EDGE_WEIGHT * edges


@torch.no_grad()
def _standardise(vae: Any, images: Pictures, batch: int) -> None:
    """Scale and shift such that latents have mean 0 and std 1, as the pipeline expects."""
    latents = torch.cat([vae.encode(as_tensor(part)).latent_dist.mean for part in _parts(images, batch)])
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))


@torch.no_grad()
def encode(vae: Any, images: Pictures, batch: int = 64) -> Tensor:
    """Latents [N, 8, 16, 16] in the pipeline's scale."""
    parts = [vae.encode(as_tensor(part)).latent_dist.mean for part in _parts(images, batch)]
    latents: Tensor = (torch.cat(parts) - vae.config.shift_factor) * vae.config.scaling_factor
    return latents


def _parts(images: Pictures, batch: int) -> list[Pictures]:
    return [images[start : start + batch] for start in range(0, len(images), batch)]
