"""How much moves in a video, without a flow network.

Frames are made grey, reduced to a longer side of 128 pixels, and lose the mean of each pixel's neighbourhood, so that
only detail is left. Blocks of 16 x 16 pixels, half overlapping, are followed from each frame to the next:

1. Search at half size: of all whole displacements d of up to 8 pixels that keep the block inside the picture, the one
   with the highest NCC(d) - STILL_FIRST * |d|. Where places look alike (along an edge), standing still wins.
2. Refine at full size, below a pixel: Gauss-Newton steps (Lucas and Kanade, 1981) that minimise
   sum (b(x + d) - a(x))^2 over standardised blocks a and b:
   d <- d - (sum g g' + r I)^-1 sum g (b(x + d) - a(x)),  with g the gradient of a, without its mean.
3. Believe it only if NCC >= MATCH. Blocks that are flat, or changed instead of moving, count as still.

NCC is the correlation of the blocks' grey values. It knows neither brightness nor contrast, and two draws of noise do
not correlate wherever one looks: that is why flicker is not motion.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field
from torch import Tensor

from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Scores, Traits
from marble_rl.section import Section

SIDE = 128
"""Longer side that displacements are measured at."""
NEIGHBOURHOOD = 9
"""Side of the square whose mean a pixel loses: slopes of light are no detail."""
BLOCK = 16
STRIDE = 8
REACH = 8
"""Search radius at half size in each direction, so 1/8 of the longer side."""
STILL_FIRST = 0.01
"""Correlation that a displacement must gain for each pixel of its length at half size."""
STEPS = 3
"""Of the refinement."""
NEARBY = 1.5
"""Most pixels, in each direction, by which it may change the result of the search."""
DAMPING = 0.05
"""r as a share of the mean eigenvalue of sum g g': along an edge a block stays where it is."""
MATCH = 0.9
LEAST_CONTRAST = 2.0
"""Standard deviation of a block's grey values (0..255) below which it is flat."""
FASTEST = 0.2
"""No score is higher: sqrt(2) * (2 * REACH + NEARBY) / SIDE = 0.193, and room for rounded sides."""


class Motion(RewardBase):
    """How much moves: mean displacement of blocks from frame to frame, in shares of the picture's longer side.

    With ``target`` minus the distance to it. A single frame gets no score.
    """

    class Params(Section):
        target: Annotated[float, Field(ge=0, le=FASTEST)] | None = None
        """The motion wanted, in shares of the longer side a frame; null: the more the better."""

    params: Params
    traits = Traits(device="cpu", range=(0.0, FASTEST), deterministic=True, media="video")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        target = self.params.target
        if target is not None:
            self.traits = replace(self.traits, range=(-max(target, FASTEST - target), 0.0))

    def score(self, batch: RewardBatch) -> Scores:
        # One video after the other: memory for one, and a score that does not depend on the rest of the batch.
        return [self._score(video) if len(video) > 1 else None for video in batch.images]

    def _score(self, video: Images) -> float:
        moved = motion(video)
        return moved if self.params.target is None else -abs(moved - self.params.target)


def motion(video: Images) -> float:
    """Mean length of the displacements in [F, H, W, 3] uint8, F > 1; 0 where no block counts."""
    with torch.autocast("cpu", enabled=False):  # in lower precision, displacements below a pixel are noise
        return float(displacements(video).norm(dim=-1).nanmean().nan_to_num())


def displacements(video: Images) -> Tensor:
    """(x, y) of N blocks to the next frame, in shares of the longer side: [F - 1, N, 2]. NaN: does not count."""
    height, width = video.shape[1:3]
    detail = _detail(video)
    before, after = detail[:-1], detail[1:]
    pixels = _refined(before, after, 2 * search(F.avg_pool2d(before, 2), F.avg_pool2d(after, 2)))
    return pixels * torch.tensor([width / detail.shape[3], height / detail.shape[2]]).div(max(width, height))


def _detail(video: Images) -> Tensor:
    """Grey pictures without their local means, [F, 1, h, w]: the longer side SIDE, the other even and no sliver."""
    height, width = video.shape[1:3]
    h, w = (max(2 * round(side * SIDE / max(height, width) / 2), 2 * BLOCK) for side in (height, width))
    frames = [Image.fromarray(frame).convert("L").resize((w, h), Image.Resampling.BILINEAR) for frame in video]
    grey = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).float()[:, None]
    return grey - F.avg_pool2d(grey, NEIGHBOURHOOD, 1, NEIGHBOURHOOD // 2, count_include_pad=False)


def search(before: Tensor, after: Tensor) -> Tensor:
    """Whole displacements [P, N, 2] of the blocks of half-size pictures [P, 1, h, w]."""
    side, stride = BLOCK // 2, STRIDE // 2
    height, width = before.shape[2:]
    mean_a = _block_means(before)
    std_a = (_block_means(before**2) - mean_a**2).clamp(min=0).sqrt()
    padded = F.pad(after, [REACH] * 4)
    mean_b = F.avg_pool2d(padded, side, 1)
    std_b = (F.avg_pool2d(padded**2, side, 1) - mean_b**2).clamp(min=0).sqrt()
    top, left = (torch.arange(n) * stride for n in mean_a.shape[2:])
    best = torch.full_like(mean_a, -math.inf)
    choice = torch.zeros_like(mean_a, dtype=torch.long)
    candidates = [(x, y) for y in range(-REACH, REACH + 1) for x in range(-REACH, REACH + 1)]
    for i, (x, y) in enumerate(candidates):
        rows, columns = (top + y >= 0) & (top + y + side <= height), (left + x >= 0) & (left + x + side <= width)
        moved = padded[..., REACH + y : REACH + y + height, REACH + x : REACH + x + width]
        at = (..., (top + REACH + y)[:, None], left + REACH + x)
        covariance = _block_means(before * moved) - mean_a * mean_b[at]
        ncc = covariance / (std_a * std_b[at]).clamp(min=1e-3)
        merit = torch.where(rows[:, None] & columns, ncc - STILL_FIRST * math.hypot(x, y), -math.inf)
        better = merit > best
        best, choice = torch.where(better, merit, best), torch.where(better, i, choice)
    return torch.tensor(candidates, dtype=torch.float32)[choice].flatten(1, 3)


def _block_means(pictures: Tensor) -> Tensor:
    """Means of half-size blocks [P, 1, rows, columns]; as blocks overlap by half, from cells of a stride."""
    return F.avg_pool2d(F.avg_pool2d(pictures, STRIDE // 2), 2, 1)


def _refined(before: Tensor, after: Tensor, start: Tensor) -> Tensor:
    """Displacements [P, N, 2] in pixels of [P, 1, h, w]."""
    places = _block_pixels(*before.shape[2:])
    still = torch.zeros_like(start)
    # Interpolated like b, so that equal pictures leave a difference of exactly 0.
    a, contrast = _standardised(_sampled(before, places, still))
    gradient_y, gradient_x = torch.gradient(before, dim=(2, 3))
    g = torch.stack([_sampled(x, places, still) for x in (gradient_x, gradient_y)], dim=-2)
    g = (g - g.mean(dim=-1, keepdim=True)) / contrast[..., None, None].clamp(min=LEAST_CONTRAST)
    normal = g @ g.mT
    r = DAMPING * normal.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-6)[..., None, None]
    inverse = torch.linalg.inv(normal + r * torch.eye(2))
    shift = start
    for _ in range(STEPS):
        b, _ = _standardised(_sampled(after, places, shift))
        step = inverse @ (g @ (b - a)[..., None])
        shift = torch.clamp(shift - step[..., 0], start - NEARBY, start + NEARBY)
    b, contrast_there = _standardised(_sampled(after, places, shift))
    flat = contrast < LEAST_CONTRAST
    followed = ((a * b).mean(-1) >= MATCH) & ~flat & (contrast_there >= LEAST_CONTRAST)
    # Near the rim a block that is not found again may have left the picture: leave it out, do not count it as still.
    size = torch.tensor([before.shape[3], before.shape[2]])
    rim = ((places < 2 * REACH) | (places >= size - 2 * REACH)).flatten(1).any(-1)
    shift = torch.where(followed[..., None], shift, 0.0)
    return torch.where((rim & ~followed & ~flat)[..., None], math.nan, shift)


def _block_pixels(height: int, width: int) -> Tensor:
    """(x, y) of every block's pixels: [N, BLOCK * BLOCK, 2], blocks in the order of the search."""
    xs, ys = torch.arange(width, dtype=torch.float32), torch.arange(height, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1)
    blocks = grid.unfold(0, BLOCK, STRIDE).unfold(1, BLOCK, STRIDE)  # [rows, columns, 2, BLOCK, BLOCK]
    return blocks.flatten(3).flatten(0, 1).mT


def _sampled(pictures: Tensor, places: Tensor, shift: Tensor) -> Tensor:
    """Values of [P, 1, h, w] at the blocks' pixels moved by shift [P, N, 2]: [P, N, BLOCK * BLOCK]."""
    last = torch.tensor([pictures.shape[3] - 1, pictures.shape[2] - 1])
    grid = (places + shift[:, :, None]) * (2 / last) - 1
    return F.grid_sample(pictures, grid, mode="bilinear", padding_mode="border", align_corners=True)[:, 0]


def _standardised(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [P, N, M] with mean 0 and standard deviation 1, and the deviation that they had [P, N]."""
    centred = blocks - blocks.mean(dim=-1, keepdim=True)
    contrast = centred.square().mean(dim=-1).sqrt()
    return centred / contrast[..., None].clamp(min=1e-3), contrast
