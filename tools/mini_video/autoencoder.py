"""The mini video pipeline's VAE: clips of 13 frames of 64x64 to 4 latent frames of 8x8 with 32 channels, and back.

It works on patches of 2x2 pixels, as Wan 2.2's does: on whole pixels, decoding would take several times as long. It has
Wan 2.2's shortcuts around down- and upsampling, too, with which it learns in fewer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from marble_rl.mini.shapes import SIZE
from marble_rl.models.pixels import to_uint8
from marble_rl.seeding import generator
from tools.mini.muon import Muon
from tools.mini.schedule import warm_up_and_fall
from tools.mini.training import Resumable, stateful

Videos = npt.NDArray[np.uint8]
"""[N, F, H, W, 3]"""
LATENT_CHANNELS = 32
"""With 16, letters of signs run together."""
PATCH = 2
SPACE, TIME = 8, 4
"""Pixels and frames of a latent one."""
NOISE = 0.05
"""Std of the noise that latents get in training, whose mean square is held at 1. With a variance that is learnt and a
KL term, half of the channels are given up."""
LENGTH_WEIGHT = 1e-3
EDGE_WEIGHT = 1.0
CROP = 32
"""Side of the crops that it is trained on. Without attention, crops teach as much at a quarter of the cost."""


def new_autoencoder(seed: int) -> Any:
    from diffusers import AutoencoderKLWan

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(
            base_dim=16,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            attn_scales=[],
            temperal_downsample=[True, True],
            z_dim=LATENT_CHANNELS,
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
            in_channels=3 * PATCH**2,
            out_channels=3 * PATCH**2,
            patch_size=PATCH,
            is_residual=True,
            scale_factor_spatial=SPACE,
            scale_factor_temporal=TIME,
        )
    _without_attention(vae)
    return vae


@torch.no_grad()
def _without_attention(vae: Any) -> None:
    """diffusers has no setting for it. With a last layer of zeros, attention adds nothing to what it passes on."""
    for block in (vae.encoder.mid_block, vae.decoder.mid_block):
        for attention in block.attentions:
            attention.requires_grad_(False)
            attention.proj.weight.zero_()
            attention.proj.bias.zero_()


def as_tensor(videos: Videos) -> Tensor:
    """uint8 [N, F, H, W, 3] -> float [N, 3, F, H, W] in [-1, 1]."""
    return torch.from_numpy(videos).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def train_autoencoder(
    vae: Any, videos: Videos, training: Resumable, *, steps: int, batch: int, seed: int, lr: float = 1e-2
) -> None:
    """Train on pixels and on differences between neighbours in space and time; then set the latents' mean and std.

    On whole clips: trained on shorter ones, it fails at the frames after them.
    """
    trained = [p for p in vae.parameters() if p.requires_grad]
    kernels = [p for p in trained if p.numel() > len(p)]
    others = [p for p in trained if p.numel() == len(p)]  # biases, and the gains of norms, [C, 1, 1, 1]
    optimizers = [Muon(kernels, lr=lr), torch.optim.AdamW(others, lr=lr / 5, weight_decay=1e-4)]
    schedules = [warm_up_and_fall(optimizer, steps) for optimizer in optimizers]
    for step in training.steps(steps, stateful({"vae": vae}, optimizers, schedules)):
        dice = generator(seed, "video autoencoder", step)
        rows = torch.randint(len(videos), (batch,), generator=dice)
        target = as_tensor(videos[rows.numpy()][(slice(None), *_crop(dice))])
        mean = vae.encode(target).latent_dist.mean
        latents = mean + NOISE * torch.randn(mean.shape, generator=dice)
        length = (mean.square().mean() - 1).clamp_min(0)
        loss = _reconstruction(vae.decode(latents).sample, target) + LENGTH_WEIGHT * length
        vae.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        training.show(step, loss.item())
    _state_the_noise(vae)
    _standardise(vae, videos[:512], batch)
    vae.eval()


def _crop(dice: torch.Generator) -> tuple[slice, slice, slice]:
    """All frames of a random crop, aligned to the latents' grid."""
    top, left = (SPACE * torch.randint((SIZE - CROP) // SPACE + 1, (2,), generator=dice)).tolist()
    return slice(None), slice(top, top + CROP), slice(left, left + CROP)


def _reconstruction(output: Tensor, target: Tensor) -> Tensor:
    edges = sum(F.l1_loss(output.diff(dim=d), target.diff(dim=d)) for d in (2, 3, 4))
    return F.l1_loss(output, target) + EDGE_WEIGHT * edges


@torch.no_grad()
def _state_the_noise(vae: Any) -> None:
    """The variance that the encoder states is that of the noise, whatever the clip."""
    vae.quant_conv.weight[LATENT_CHANNELS:] = 0.0
    vae.quant_conv.bias[LATENT_CHANNELS:] = 2 * math.log(NOISE)


def _standardise(vae: Any, videos: Videos, batch: int) -> None:
    """Mean and std of every channel, which the pipeline takes out."""
    latents = torch.cat(list(_means(vae, videos, batch)))
    mean, std = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


def encode(vae: Any, videos: Videos, batch: int = 16) -> Tensor:
    """Latents [N, 32, 4, 8, 8] in the pipeline's scale."""
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    return torch.cat([(part - mean) / std for part in _means(vae, videos, batch)])


@torch.no_grad()
def reconstructed(vae: Any, videos: Videos, batch: int = 16) -> Videos:
    """What is left of clips after encoding and decoding."""
    parts = [to_uint8(vae.decode(means).sample) for means in _means(vae, videos, batch)]
    return torch.cat(parts).numpy()


@torch.no_grad()
def _means(vae: Any, videos: Videos, batch: int) -> Iterator[Tensor]:
    for start in range(0, len(videos), batch):
        yield vae.encode(as_tensor(videos[start : start + batch])).latent_dist.mean
