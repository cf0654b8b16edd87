"""`marble rewards check`: load each reward, score a sample picture, and compare the result with the reward's traits."""

from __future__ import annotations

import math
import time
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

from marble_rl.devices import resident
from marble_rl.errors import InputError, MarbleError
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
BATCH = 4
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
    """Score of the sample image; None if the reward returned None."""
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


def check_reward(
    reward: CalledReward, device: torch.device, prompts: Sequence[Prompt], image: Images | None
) -> RewardCheck:
    """Load the reward and score a few pictures with it. Its errors become part of the result."""
    before = _memory_in_use()  # on all devices: only after loading is it known which one the reward uses
    try:
        reward.load(device)
        prompt = next((p for p in prompts if reward.applies_to(p)), None) or _fitting_sample(reward)
        if prompt is None:
            return RewardCheck(reward.name, error="applies to none of the prompts; give one with --prompt")
        return _scored(reward, prompt, image, before)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a reward may call sys.exit
        return RewardCheck(
            reward.name, error=str(error) if isinstance(error, MarbleError) else f"{type(error).__name__}: {error}"
        )


def _fitting_sample(reward: CalledReward) -> Prompt | None:
    """The first sample prompt that the reward applies to. Some ask for objects that a detector does not know."""
    for prompt in SAMPLE_PROMPTS:
        with suppress(InputError):
            if reward.applies_to(prompt):
                return prompt
    return None


def _scored(reward: CalledReward, prompt: Prompt, image: Images | None, before: Mapping[str, int]) -> RewardCheck:
    pictures = _variations(sample_picture(prompt) if image is None else image)
    if reward.traits.media == "video":
        pictures = _moving(pictures)
    batch = RewardBatch(pictures, [prompt] * len(pictures))
    first, _ = _timed(reward, batch)
    second, seconds = _timed(reward, batch)
    alone = [reward.score_fresh(RewardBatch(pictures[i : i + 1], [prompt]))[0] for i in range(len(pictures))]
    place = _memory_key(reward.device)
    deterministic = first == second
    broken = reward.traits.deterministic and not deterministic
    return RewardCheck(
        reward.name,
        prompt.text,
        first[0],
        1000 * seconds / len(pictures),
        max(_memory_in_use()[place] - before[place], 0),
        True,  # `score_fresh` raises if a score is not finite
        deterministic,
        max((abs(a - b) for a, b in zip(first, alone, strict=True) if a is not None and b is not None), default=None),
        "declares itself deterministic, but a second call returned other scores" if broken else None,
    )


def _timed(reward: CalledReward, batch: RewardBatch) -> tuple[Scores, float]:
    began = time.perf_counter()
    scores = reward.score_fresh(batch)
    return scores, time.perf_counter() - began


def _memory_in_use() -> dict[str, int]:
    """Bytes in use: of this process in host memory, and of torch on each GPU."""
    cards = {f"cuda:{card}": torch.cuda.memory_allocated(card) for card in range(torch.cuda.device_count())}
    return {HOST: resident(), **cards}


def _memory_key(device: torch.device) -> str:
    if device.type != "cuda":
        return HOST
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def read_picture(path: Path) -> Images:
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise InputError(f"--image: cannot read {path} as a picture ({error}); give a PNG or JPEG file") from None


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


def _variations(image: Images) -> Images:
    """[BATCH, H, W, 3]: the picture itself, darker, mirrored, and with noise."""
    noise = np.random.default_rng(0).integers(-40, 41, image.shape)
    noisy = np.clip(image.astype(np.int64) + noise, 0, 255).astype(np.uint8)
    return np.stack([image, image // 2, image[:, ::-1], noisy])


def _moving(pictures: Images) -> Images:
    """[B, FRAMES, H, W, 3]: every picture sliding to the right."""
    step = max(1, pictures.shape[2] // 64)
    return np.stack([np.roll(pictures, frame * step, axis=2) for frame in range(FRAMES)], axis=1)


def print_checks(checks: Sequence[RewardCheck], rewards: Mapping[str, Traits], console: Console) -> None:
    """Print the results. ``rewards``: the traits of each reward."""
    table = Table(box=SIMPLE_HEAD, caption_justify="left")
    table.add_column("reward", no_wrap=True)
    for column in ("score", "range", "ms/image", "MiB", "finite", "deter-\nministic", "in\nbatch"):
        table.add_column(column, justify="right")
    for check in checks:
        if check.milliseconds is None:
            table.add_row(check.name, "[red]failed")
            continue
        table.add_row(
            check.name,
            "none" if check.score is None else f"{check.score:.4g}",
            _shown_range(*rewards[check.name].range),
            f"{check.milliseconds:.1f}",
            f"{(check.memory_bytes or 0) / 2**20:.0f}",
            "yes" if check.finite else "no",
            "yes" if check.deterministic else "no",
            "" if check.batch_difference is None else f"±{check.batch_difference:.1g}",
        )
    console.print(table)
    for prompt in dict.fromkeys(check.prompt for check in checks if check.prompt is not None):
        names = ", ".join(check.name for check in checks if check.prompt == prompt)
        console.print(f"{prompt!r}: {names}", style="dim", markup=False, soft_wrap=True)
    console.print("in batch: largest difference between an image's score in a batch and alone", style="dim")
    for check in checks:
        if check.error is not None:
            console.print(f"{check.name}: {check.error}", style="red", markup=False, soft_wrap=True)


def _shown_range(low: float, high: float) -> str:
    return "any" if math.isinf(low) and math.isinf(high) else f"{low:g} .. {high:g}"
