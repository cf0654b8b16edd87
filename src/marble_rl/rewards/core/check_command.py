"""`marble rewards check`: load each reward, score different pictures, compare the result with the reward's traits."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marble_rl.devices import accelerator, allocated_bytes, current_index, device_count, resident
from marble_rl.errors import InputError, MarbleError, described, text_of
from marble_rl.prompts.wanted import wanted_text
from marble_rl.rewards.core.base import Images, RewardBatch, Scores, Traits
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.types import Prompt

SAMPLE_PROMPTS = (
    Prompt(0, 'a poster that says "MARBLE"', "sample"),
    Prompt(
        1,
        "a photo of a red apple",
        "sample",
        {"tag": "colors", "include": [{"class": "apple", "count": 1, "color": "red"}]},
    ),
    Prompt(
        2, "a red marble", "sample", {"tag": "colors", "include": [{"class": "marble", "count": 1, "color": "red"}]}
    ),
    Prompt(3, "a red ball on a green meadow", "sample"),
)
"""Tried in this order where the config has no prompt that a reward applies to."""
FRAMES = 8
HOST = "host"


class ChecksFailed(MarbleError):
    """A reward could not be loaded, did not score, or does not do what its traits declare."""


@dataclass(frozen=True)
class RewardCheck:
    """The result of checking one reward."""

    name: str
    prompt: str | None = None
    score: float | None = None
    """Score of the first picture; None if the reward returned None."""
    lowest: float | None = None
    """Of all pictures"""
    highest: float | None = None
    milliseconds: float | None = None
    """Time per image, measured on the second call with a batch"""
    memory_bytes: int | None = None
    """Held on its device after loading and scoring, including packages that it was the first to import."""
    finite: bool = False
    """Whether every score is finite or None"""
    deterministic: bool | None = None
    """Whether a second call gave the same scores, bit for bit."""
    batch_difference: float | None = None
    """Largest difference between an image's score in a batch and alone."""
    error: str | None = None
    """Why it failed, if it did."""
    warning: str | None = None
    """What may be wrong with it"""


def check_reward(
    reward: CalledReward, device: torch.device, prompts: Sequence[Prompt], images: Sequence[Images] = ()
) -> RewardCheck:
    """Load the reward and score a few pictures with it. Its errors become part of the result."""
    before = _memory_in_use()  # on all devices: only after loading is it known which one the reward uses
    try:
        reward.load(device)
        prompt = next((p for p in prompts if reward.applies_to(p)), None) or _fitting_sample(reward)
        if prompt is None:
            return RewardCheck(reward.name, error="applies to none of the prompts; give one with --prompt")
        return _scored(reward, prompt, images, before)
    except Exception as error:
        return RewardCheck(reward.name, error=str(error) if isinstance(error, MarbleError) else described(error))


def _fitting_sample(reward: CalledReward) -> Prompt | None:
    """The first sample prompt that the reward applies to. Some ask for objects that a detector does not know."""
    for prompt in SAMPLE_PROMPTS:
        with suppress(InputError):
            if reward.applies_to(prompt):
                return prompt
    return None


def _scored(reward: CalledReward, prompt: Prompt, images: Sequence[Images], before: Mapping[str, int]) -> RewardCheck:
    pictures = _pictures(images or [sample_picture(prompt)])
    if reward.traits.media == "video":
        pictures = _moving(pictures)
    batch = RewardBatch(pictures, [prompt] * len(pictures))
    first, _ = _timed(reward, batch)
    second, seconds = _timed(reward, batch)
    alone = [reward.score_fresh(RewardBatch(pictures[i : i + 1], [prompt]))[0] for i in range(len(pictures))]
    place = _memory_key(reward.device)
    deterministic = first == second
    known = [score for score in first if score is not None]
    broken = "declares itself deterministic, but a second call returned other scores"
    constant, is_error = _constant(known, reward.traits.range)
    return RewardCheck(
        reward.name,
        prompt.text,
        first[0],
        min(known, default=None),
        max(known, default=None),
        1000 * seconds / len(pictures),
        max(_memory_in_use()[place] - before[place], 0),
        True,  # `score_fresh` raises if a score is not finite
        deterministic,
        max((abs(a - b) for a, b in zip(first, alone, strict=True) if a is not None and b is not None), default=None),
        broken if reward.traits.deterministic and not deterministic else constant if is_error else None,
        None if is_error else constant,
    )


def _constant(scores: Sequence[float], limits: tuple[float, float]) -> tuple[str | None, bool]:
    """What to say of a reward that gave all pictures the same score, and whether that is an error. A 0, or an
    end of its range, is not: a reward for something that no picture shows gives 0 to all of them."""
    if len(set(scores)) != 1:
        return None, False
    text = (
        f"gave {scores[0]:g} to {len(scores)} different pictures; a constant reward teaches nothing. Give pictures "
        "that it should tell apart: --image good.png --image bad.png"
    )
    return text, scores[0] not in (0, *limits)


def _timed(reward: CalledReward, batch: RewardBatch) -> tuple[Scores, float]:
    began = time.perf_counter()
    scores = reward.score_fresh(batch)
    return scores, time.perf_counter() - began


def _memory_in_use() -> dict[str, int]:
    """Bytes in use: of this process in host memory, and of torch on each accelerator."""
    found = accelerator()
    there = [] if found is None else [torch.device(found.type, index) for index in range(device_count())]
    return {HOST: resident(), **{str(device): allocated_bytes(device) for device in there}}


def _memory_key(device: torch.device) -> str:
    if device.type == "cpu":
        return HOST
    return f"{device.type}:{current_index(device) if device.index is None else device.index}"


def read_picture(path: Path) -> Images:
    """[H, W, 3]. Anything but a picture of a sensible size is refused."""
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
            raise OSError("not a file")
        with warnings.catch_warnings():  # Pillow only warns of what is half as large as what it refuses
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                return np.asarray(image.convert("RGB"))
    except Exception as error:  # of many kinds, according to what is wrong with the file
        reason = text_of(error) or type(error).__name__
        raise InputError(f"--image: cannot read {path} as a picture ({reason}); give a PNG or JPEG file") from None


def sample_picture(prompt: Prompt, size: int = 512) -> Images:
    """A red ball on a meadow, or the text that the prompt asks for on a plate: something for each reward to look at."""
    picture = Image.new("RGB", (size, size), "skyblue")
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0.6 * size, size, size), fill="forestgreen")
    text = wanted_text(prompt)
    if text is None:
        draw.ellipse((0.3 * size, 0.35 * size, 0.7 * size, 0.75 * size), fill="firebrick", outline="black", width=4)
    else:
        font = ImageFont.load_default(min(0.16, 1.3 / len(text)) * size)
        draw.rectangle((0.05 * size, 0.35 * size, 0.95 * size, 0.65 * size), fill="white", outline="black", width=4)
        draw.text((size / 2, size / 2), text, fill="black", font=font, anchor="mm")
    return np.asarray(picture)


def _pictures(given: Sequence[Images]) -> Images:
    """[B, H, W, 3] in the size of the first one. A single picture: also darker, mirrored, with noise, and in its place
    a grey area and blocks of colours. They have little in common, so that few rewards score all of them alike."""
    image = given[0]
    if len(given) > 1:
        size = (image.shape[1], image.shape[0])
        return np.stack([np.asarray(Image.fromarray(one).resize(size)) for one in given])
    dice = np.random.default_rng(0)
    noisy = np.clip(image.astype(np.int64) + dice.integers(-40, 41, image.shape), 0, 255).astype(np.uint8)
    colours = Image.fromarray(dice.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    blocks = np.asarray(colours.resize((image.shape[1], image.shape[0]), Image.Resampling.NEAREST))
    return np.stack([image, image // 2, image[:, ::-1], noisy, np.full_like(image, 128), blocks])


def _moving(pictures: Images) -> Images:
    """[B, FRAMES, H, W, 3]: every picture sliding to the right."""
    step = max(1, pictures.shape[2] // 64)
    return np.stack([np.roll(pictures, frame * step, axis=2) for frame in range(FRAMES)], axis=1)


def print_checks(checks: Sequence[RewardCheck], rewards: Mapping[str, Traits], console: Console) -> None:
    """Print the results. ``rewards``: the traits of each reward."""
    table = Table(box=SIMPLE_HEAD, caption_justify="left")
    table.add_column("reward", no_wrap=True)
    for column in ("score", "lowest", "highest", "range", "ms/\nimage", "MiB", "same\ntwice", "in\nbatch"):
        table.add_column(column, justify="right")
    for check in checks:
        if check.milliseconds is None:
            table.add_row(check.name, "[red]failed")
            continue
        table.add_row(
            check.name,
            *("none" if score is None else f"{score:.3g}" for score in (check.score, check.lowest, check.highest)),
            _shown_range(*rewards[check.name].range),
            f"{check.milliseconds:.{1 if check.milliseconds < 100 else 0}f}",
            f"{(check.memory_bytes or 0) / 2**20:.0f}",
            "yes" if check.deterministic else "no",
            "" if check.batch_difference is None else f"±{check.batch_difference:.1g}",
        )
    console.print(table)
    for prompt in dict.fromkeys(check.prompt for check in checks if check.prompt is not None):
        names = ", ".join(check.name for check in checks if check.prompt == prompt)
        console.print(f"{prompt!r}: {names}", style="dim", markup=False, soft_wrap=True)
    console.print(
        "score: of the first picture; lowest, highest: of all; same twice: deterministic; in batch: largest difference "
        "between an image's score in a batch and alone",
        style="dim",
        soft_wrap=True,
    )
    for check in checks:
        if check.warning is not None:
            console.print(f"{check.name}: {check.warning}", style="yellow", markup=False, soft_wrap=True)
        if check.error is not None:
            console.print(f"{check.name}: {check.error}", style="red", markup=False, soft_wrap=True)


def _shown_range(low: float, high: float) -> str:
    return "any" if math.isinf(low) and math.isinf(high) else f"{low:.3g}..{high:.3g}"
