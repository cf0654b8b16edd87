"""`marble sample`: prompts under one or several sets of weights, as single files and as one labelled grid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from marble_rl.config import RunConfig
from marble_rl.config.run import EvaluationConfig
from marble_rl.errors import InputError
from marble_rl.inference.opening import Opened, Weights, sample_images
from marble_rl.models import known_media
from marble_rl.models.base import PromptCache
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.rollout.solvers import Solver
from marble_rl.runs.images import (
    Card,
    Picture,
    comparison,
    save_as,
    save_file,
    save_sample,
    sheet_file,
    shrunk,
    unused,
)
from marble_rl.runs.media import SUFFIXES, check_writable
from marble_rl.types import Media

AGAIN = "sample again"
"""What helps where a file could not be written."""
TILES = (512, 384, 256, 192, 128)
"""Sides of a picture in the grid, in pixels: the largest at which the grid has at most `MOST_PIXELS`."""
MOST_PIXELS = 64_000_000
"""Of all frames together."""
FILE_TYPE = re.compile(r"\.[a-z][a-z0-9]{2,3}", re.IGNORECASE)
"""A suffix that looks like a type of file: .avi and .tiff, not .5 and .v2"""


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
    fps: int | None
    """Of a video, as a file"""

    def arguments(self, config: RunConfig | None) -> dict[str, Any]:
        """Of `sample_images`: what was not asked for is that of the run, or the default."""
        evaluation = EvaluationConfig() if config is None else config.evaluation
        size = RolloutConfig() if config is None else config.rollout
        defaults = {"steps": evaluation.steps, "solver": evaluation.solver}
        defaults |= {key: getattr(size, key) for key in ("height", "width", "frames")}
        given = {key: value for key, value in vars(self).items() if key != "fps"}
        return {key: defaults.get(key) if value is None else value for key, value in given.items()}


def is_file(out: Path) -> bool:
    """Whether --out names a file, not a folder."""
    return FILE_TYPE.fullmatch(out.suffix) is not None and not out.is_dir()


def check_file(out: Path, model_path: str, samples: int) -> None:
    """Refuse a file that cannot hold the samples, as far as that is known before a model is loaded."""
    check_suffix(out, known_media(model_path), model_path)
    if samples > 1:
        raise InputError(f"--out: {str(out)!r} is one file, but {samples} are asked for; give a folder")
    check_writable(out.suffix.lower(), "--out")


def check_suffix(out: Path, media: Media | None, model: str) -> None:
    """Refuse a file that does not suit what the model makes; None if that is not known yet."""
    allowed = sorted({end for kind, ends in SUFFIXES.items() if media in (kind, None) for end in ends})
    if out.suffix.lower() not in allowed:
        makes = "which is not written here" if media is None else f"but {model} makes {media}s"
        raise InputError(
            f"--out: {str(out)!r} ends in {out.suffix}, {makes}; give a name that ends in {' or '.join(allowed)}, or a "
            "folder"
        )


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

    ``out``: a file for a single sample, or a folder, in which names say what differs: the number of the prompt
    (``numbered``), the weights where there are several, the seed.
    """
    opened.check_weights(weights)
    cache = PromptCache(opened.model)
    cache.prepare(prompts)
    arguments = how.arguments(opened.config)
    fps = how.fps or (None if opened.config is None else opened.config.logging.fps)
    if is_file(out):  # again: before loading, a model on the hub could not be asked
        check_suffix(out, opened.model.media(), opened.model.name)
    shown: dict[tuple[int, int], list[Picture[Tensor]]] = {}
    for role in weights:
        with opened.acting_as(role):
            for i, prompt in enumerate(prompts):
                for j, pixels in enumerate(sample_images(opened, prompt, **arguments, prompt_cache=cache)):
                    number, label = [f"{i + 1:03}"] if numbered else [], [role] if len(weights) > 1 else []
                    if is_file(out):
                        yield save_as(pixels, out, AGAIN, fps)
                        return
                    name = "-".join([*number, *label, f"seed-{how.seed + j}"])
                    yield save_sample(pixels, out / name, AGAIN, fps)
                    if grid:
                        tile = _tile(len(prompts) * how.images * len(weights) * pixels.shape[:-3].numel())
                        shown.setdefault((i, j), []).append(Picture(role, shrunk(pixels, tile), {}))
    if grid:
        names = {(i, j): (f"seed {how.seed + j}: " if how.images > 1 else "") + prompts[i] for i, j in shown}
        cards = [Card(names[place], tuple(pictures)) for place, pictures in sorted(shown.items())]
        side = max(max(picture.image.shape[-3:-1]) for card in cards for picture in card.pictures)
        data, suffix = sheet_file(comparison([cards], max(TILES[-1], side)), fps)
        file = unused(out / f"grid{suffix}")
        save_file(data, file, AGAIN)
        yield file


def _tile(frames: int) -> int:
    return next((tile for tile in TILES if frames * tile**2 <= MOST_PIXELS), TILES[-1])
