"""`marble sample`: prompts under one or several sets of weights, as single files and as one labelled grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marble_rl.config import RunConfig
from marble_rl.config.run import EvaluationConfig
from marble_rl.inference.opening import Opened, Weights, sample_images
from marble_rl.models.base import PromptCache
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.rollout.solvers import Solver
from marble_rl.runs.images import Card, Picture, comparison, save_sample, shrunk

AGAIN = "sample again"
"""What helps where a file could not be written."""
TILES = (512, 384, 256, 192, 128)
"""Sides of a picture in the grid, in pixels: the largest at which the grid has at most `MOST_PIXELS`."""
MOST_PIXELS = 64_000_000


@dataclass(frozen=True)
class Sampling:
    """How images are sampled, as far as it was asked for."""

    seed: int
    images: int
    """Of each prompt; image i has seed + i"""
    steps: int | None
    solver: Solver | None
    height: int | None
    width: int | None
    frames: int | None

    def arguments(self, config: RunConfig | None) -> dict[str, Any]:
        """Of `sample_images`: what was not asked for is that of the run, or the default."""
        evaluation = EvaluationConfig() if config is None else config.evaluation
        size = RolloutConfig() if config is None else config.rollout
        defaults = {"steps": evaluation.steps, "solver": evaluation.solver}
        defaults |= {key: getattr(size, key) for key in ("height", "width", "frames")}
        return {key: defaults.get(key) if value is None else value for key, value in vars(self).items()}


def save_samples(
    opened: Opened,
    prompts: Sequence[str],
    weights: Sequence[Weights],
    how: Sampling,
    out: Path,
    *,
    numbered: bool,
    grid: bool,
) -> Iterator[Path]:
    """Sample every prompt with each of the weights. Yields each file when it is written, last the grid.

    Names say what differs: the number of the prompt (``numbered``), the weights where there are several, the seed.
    """
    opened.check_weights(weights)
    cache = PromptCache(opened.model)
    cache.prepare(prompts)
    arguments = how.arguments(opened.config)
    tile = _tile(len(prompts) * how.images * len(weights))
    shown: dict[tuple[int, int], list[Picture[Tensor]]] = {}
    for role in weights:
        with opened.acting_as(role):
            for i, prompt in enumerate(prompts):
                for j, pixels in enumerate(sample_images(opened, prompt, **arguments, prompt_cache=cache)):
                    number, label = [f"{i + 1:03}"] if numbered else [], [role] if len(weights) > 1 else []
                    yield save_sample(pixels, out / "-".join([*number, *label, f"seed-{how.seed + j}"]), AGAIN)
                    if grid:
                        shown.setdefault((i, j), []).append(Picture(role, shrunk(pixels, tile), {}))
    if grid:
        names = {(i, j): (f"seed {how.seed + j}: " if how.images > 1 else "") + prompts[i] for i, j in shown}
        cards = [Card(names[place], tuple(pictures)) for place, pictures in sorted(shown.items())]
        side = max(max(picture.image.shape[-3:-1]) for card in cards for picture in card.pictures)
        sheet = comparison([cards], max(TILES[-1], side))
        yield save_sample(torch.from_numpy(np.array(sheet)), out / "grid", AGAIN)


def _tile(pictures: int) -> int:
    return next((tile for tile in TILES if pictures * tile**2 <= MOST_PIXELS), TILES[-1])
