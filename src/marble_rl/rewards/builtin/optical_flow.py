"""Whether what moves in a video moves as its prompt asks, by optical flow: no detector, whatever the object is.

A check on `trajectory`, which it shares only the form of the metadata with. From each frame A to the next frame B:

1. Frames are reduced to a longer side of 64 pixels, smoothed, and divided by their brightness against the median frame:
   flicker is no motion.
2. M, the moving pixels: those that change by more than the noise, and their neighbours.
3. The displacement d of up to `REACH` pixels each way that minimises sum over M of |B(x + d) - A(x)|^2, computed for
   all d at once by FFT, then to a fraction of a pixel by a parabola. It is believed only if it explains at least half
   of the change; an object that vanishes is not found anywhere.

For two objects the moving pixels are divided at their middle, across the direction in which they are spread furthest.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from PIL import Image
from pydantic import Field

from marble_rl.rewards.builtin.motion_form import DIRECTIONS, PAIRS, WantedMotion, wanted_motion
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Scores, Traits
from marble_rl.section import Section
from marble_rl.types import Prompt

Floats = npt.NDArray[np.float32]
Flow = npt.NDArray[np.float64]
SIDE = 64
"""Longer side at which displacements are measured."""
REACH = 14
"""Most pixels from one frame to the next."""
SMOOTH = 0.8
LEAST_CHANGE = 20.0
"""Sum over the three channels, of 255 each, from which a pixel moves."""
NOISE = 6.0
"""A pixel that moves changes by so many times what the calmest fifth of the picture changes by at most."""
FEWEST = 8
"""Moving pixels."""
EXPLAINED = 0.5
"""Least share of the squared change that a displacement takes away."""
LEAST = 0.15
"""Least way, in longer sides, where no speed is wanted."""
Distance = Annotated[float, Field(gt=0, le=1)]


class OpticalFlow(RewardBase):
    """Whether the moving pixels move in the direction and at the speed that the prompt asks for: to evaluate with.

    It applies to prompts with `motion` in their metadata.
    """

    class Params(Section):
        slow: Distance = 0.2
        """How far something slow moves in the whole video, in longer sides of the picture."""
        fast: Distance = 0.55
        """How far something fast moves."""

    params: Params
    traits = Traits(range=(0, 1), deterministic=True, media="video", device="cpu")

    def applies_to(self, prompt: Prompt) -> bool:
        return wanted_motion(prompt) is not None

    def score(self, batch: RewardBatch) -> Scores:
        wanted = [motion for prompt in batch.prompts if (motion := wanted_motion(prompt)) is not None]
        if batch.images.shape[1] < 3:
            return [None] * len(wanted)
        return [self._judged(video, motion) for video, motion in zip(batch.images, wanted, strict=True)]

    def _judged(self, video: Images, wanted: WantedMotion) -> float:
        if wanted.kind in PAIRS:
            return _closing(flow(video, parts=2), wanted.kind)
        steps = flow(video)[:, 0]
        if wanted.kind == "bounce":
            return _bouncing(steps, wanted.direction)
        half = len(steps) // 2
        early, late, total = steps[:half].sum(axis=0), steps[half:].sum(axis=0), steps.sum(axis=0)
        towards = np.array(DIRECTIONS[wanted.direction or "down"])
        length = max(float(np.linalg.norm(total)), 1e-9)
        score = max(float(total @ towards) / length, 0.0)
        if wanted.speed is None:
            score *= min(length / LEAST, 1)
        else:
            distance = {"slow": self.params.slow, "fast": self.params.fast}[wanted.speed]
            ratio = length / (distance / 2 if wanted.kind == "stop" else distance)
            score *= min(ratio, 1 / ratio, 1)
        if wanted.kind == "stop":
            score *= 1 - min(float(np.linalg.norm(late)) / max(float(np.linalg.norm(early)), 1e-9), 1)
        if wanted.kind == "fall":  # twice as far in the later half, at least
            score *= float(np.clip(late[1] / max(early[1], 1e-9) - 1, 0, 1))
        return score * _steady(steps)


def flow(video: Images, parts: int = 1) -> Flow:
    """Displacement (across, down) of the moving pixels from each frame to the next, in longer sides: [F - 1, parts, 2].

    0 where nothing moves, or where it is not found again.
    """
    from scipy import ndimage  # slow to import

    frames = _even_light(ndimage.gaussian_filter(_reduced(video), (0, SMOOTH, SMOOTH, 0)))
    change = np.abs(np.diff(frames, axis=0)).sum(axis=-1)
    calm = np.quantile(change, 0.2, axis=(1, 2), keepdims=True)
    moving = change > np.maximum(LEAST_CHANGE, NOISE * calm)
    masks = ndimage.binary_dilation(moving, np.ones((1, 5, 5), dtype=bool))
    masks &= (moving.sum(axis=(1, 2)) >= FEWEST)[:, None, None]
    divided = masks[:, None] & _halves((change * moving).sum(axis=0)) if parts == 2 else masks[:, None]
    return np.stack([_matched(a, b, part) for a, b, part in zip(frames[:-1], frames[1:], divided, strict=True)])


def _reduced(video: Images) -> Floats:
    """[F, h, w, 3], no side longer than `SIDE`."""
    height, width = video.shape[1:3]
    if max(height, width) <= SIDE:
        return video.astype(np.float32)
    size = (max(round(width * SIDE / max(height, width)), 1), max(round(height * SIDE / max(height, width)), 1))
    frames = [Image.fromarray(frame).resize(size, Image.Resampling.BOX) for frame in video]
    return np.stack([np.asarray(frame, dtype=np.float32) for frame in frames])


def _even_light(frames: Floats) -> Floats:
    """Every frame as bright as the median frame, in the median pixel."""
    ratio = (frames + 1) / (np.median(frames, axis=0) + 1)
    return np.asarray(frames / np.median(ratio, axis=(1, 2), keepdims=True), dtype=np.float32)


def _halves(change: Floats) -> npt.NDArray[np.bool_]:
    """The two sides [2, h, w] of the middle of all change, left and right or above and below: where it spreads."""
    places = np.indices(change.shape, dtype=float)
    weight = change / max(float(change.sum()), 1e-9)
    middle = (places * weight).sum(axis=(1, 2))
    spread = (np.square(places - middle[:, None, None]) * weight).sum(axis=(1, 2))
    axis = int(spread.argmax())
    first = places[axis] < middle[axis]
    return np.stack([first, ~first])


def _matched(a: Floats, b: Floats, masks: npt.NDArray[np.bool_]) -> Flow:
    """Displacement of each part [P, h, w] of the moving pixels from one frame to the other, [P, 2]."""
    from scipy import fft

    found = np.zeros((len(masks), 2))
    height, width = a.shape[:2]
    if not masks.any():
        return found
    size = (fft.next_fast_len(height + 2 * REACH, real=True), fft.next_fast_len(width + 2 * REACH, real=True))
    padded = np.pad(b, ((REACH, REACH), (REACH, REACH), (0, 0)), mode="edge")
    there = fft.rfft2(padded, size, axes=(0, 1))
    squared = fft.rfft2(np.square(padded).sum(axis=-1), size)
    for part, mask in enumerate(masks):
        if mask.sum() < FEWEST:
            continue
        here = a * mask[..., None]
        product = (fft.rfft2(here, size, axes=(0, 1)).conj() * there).sum(axis=-1)
        spectrum = fft.rfft2(mask.astype(np.float32), size).conj() * squared - 2 * product
        unlike = fft.irfft2(spectrum, size)[: 2 * REACH + 1, : 2 * REACH + 1] + np.square(here).sum()
        down, across = np.unravel_index(int(unlike.argmin()), unlike.shape)
        if unlike[down, across] <= (1 - EXPLAINED) * unlike[REACH, REACH]:
            found[part] = _vertex(unlike[down, :], across), _vertex(unlike[:, across], down)
    return np.asarray((found - np.where(found.any(axis=1), REACH, 0)[:, None]) / max(height, width))


def _vertex(values: Floats, lowest: np.intp) -> float:
    """Where the parabola through the lowest value and its neighbours has its vertex."""
    if not 0 < lowest < len(values) - 1:
        return float(lowest)
    left, middle, right = map(float, values[lowest - 1 : lowest + 2])
    return float(lowest) + 0.5 * (left - right) / max(left - 2 * middle + right, 1e-9)


def _steady(steps: Flow) -> float:
    """1 unless more than a third of the way is a single step; 0 if all of it is."""
    lengths = np.linalg.norm(steps, axis=-1)
    share = float(lengths.max() / max(float(lengths.sum()), 1e-9))
    return float(np.clip((1 - share) * 1.5, 0, 1))


def _bouncing(steps: Flow, direction: str | None) -> float:
    """The shorter of the way down to the lowest point and the way up from it."""
    height = np.concatenate([[0.0], np.cumsum(steps[:, 1])])
    low = int(height.argmax())
    score = min((height[low] - height[: low + 1].min()) / LEAST, (height[low] - height[low:].min()) / LEAST, 1.0)
    if direction is not None:
        score *= float(np.clip(steps[:, 0].sum() * DIRECTIONS[direction][0] / LEAST, 0, 1))
    return float(score) * _steady(steps)


def _closing(steps: Flow, kind: str) -> float:
    """How far the two parts approach each other, or leave each other, along the line between them."""
    apart = (steps[:, 1] - steps[:, 0]).sum(axis=0)  # the second part is to the right, or below
    far = float(apart[np.abs(apart).argmax()])
    return float(np.clip((far if kind == "part" else -far) / LEAST, 0, 1)) * _steady(steps[:, 1] - steps[:, 0])
