"""How well `trajectory` and `optical_flow` judge clips whose answers are known, and what they cost.

python -m tools.mini_video.check
python -m tools.mini_video.check --vae build/mini-video/vae      # what an autoencoder leaves of them
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import typer

from marble_rl.rewards.builtin.frames import Frames as FramesReward
from marble_rl.rewards.builtin.optical_flow import OpticalFlow, flow
from marble_rl.rewards.builtin.trajectory import Trajectory
from marble_rl.rewards.core.base import Reward, RewardBatch
from marble_rl.types import Prompt
from tools.mini_video import flaws
from tools.mini_video.autoencoder import reconstructed
from tools.mini_video.render import Frames, render_clip
from tools.mini_video.scenes import DIRECTIONS, KINDS, Clip, draw_clip

REWARDS: dict[str, Reward] = {
    "strict": Trajectory(halo=0.4),
    "dense": Trajectory(halo=0.4, credit="dense"),
    "optical_flow": OpticalFlow(),
}
TEXT: Reward = FramesReward(
    reward={"type": "ocr", "params": {"region": [0.02, 0.14, 0.98, 0.78]}}, frames=4, reduce="steady"
)
MODERATE = {
    "blur": partial(flaws.blurred, severity=0.1),
    "noise": partial(flaws.grainy, severity=0.1),
    "pale": partial(flaws.pale, severity=0.2),
    "flicker": partial(flaws.flickering, severity=0.4),
}
"""Flaws that must not hide a motion."""
Scores = dict[str, npt.NDArray[np.float64]]


def drawn(kind: str, count: int, seed: int = 0) -> list[Clip]:
    """Clips of one kind of motion."""
    dice = random.Random(f"check/{kind}/{seed}")
    clips: list[Clip] = []
    while len(clips) < count:
        clip = draw_clip("motion", dice)
        clips += [clip] if clip.metadata["motion"]["kind"] == kind else []
    return clips


def scored(videos: Sequence[Frames], wanted: Sequence[Clip], names: Sequence[str] = tuple(REWARDS)) -> Scores:
    """What each reward gives the videos, under the captions of ``wanted``."""
    prompts = [Prompt(i, clip.caption, clip.source, clip.metadata) for i, clip in enumerate(wanted)]
    batch = RewardBatch(np.stack(videos), prompts)
    return {name: np.array(REWARDS[name].score(batch), dtype=np.float64) for name in names}


def wrong(clips: Sequence[Clip], what: str) -> tuple[list[Frames], list[Clip]]:
    """Videos with one thing wrong, and the clips that they should have shown."""
    dice = random.Random(f"check/{what}")
    pairs = [(flaws.WRONG[what](clip, dice), clip) for clip in clips]
    return (
        [render_clip(shown, dice) for shown, _ in pairs if shown is not None],
        [clip for shown, clip in pairs if shown is not None],
    )


def right_directions(clips: Sequence[Clip], videos: Sequence[Frames]) -> npt.NDArray[np.bool_]:
    """Whether the flow of clips that have a direction points there, of the four."""
    right = []
    for clip, video in zip(clips, videos, strict=True):
        motion = clip.metadata["motion"]
        if motion["kind"] in ("move", "stop", "fall"):
            total = flow(video).sum(axis=(0, 1))
            seen = max(DIRECTIONS, key=lambda name: float(total @ DIRECTIONS[name]))
            right.append(seen == motion.get("direction", "down"))
    return np.array(right)


def main(
    count: Annotated[int, typer.Option(help="Clips of each kind of motion.")] = 40,
    vae: Annotated[
        Path | None, typer.Option(help="Folder of an autoencoder: judge what it leaves of clean clips.")
    ] = None,
) -> None:
    """Print the figures of docs/mini_video.md."""
    torch.set_num_threads(1)
    dice = random.Random(0)
    clips = {kind: drawn(kind, count) for kind in KINDS}
    videos = {kind: [render_clip(clip, dice) for clip in clips[kind]] for kind in KINDS}
    if vae is not None:
        _show_what_is_left(vae, clips, videos, dice)
        return
    every = [clip for kind in KINDS for clip in clips[kind]]
    shown = [video for kind in KINDS for video in videos[kind]]
    for kind in KINDS:
        _show(f"clean: {kind}", scored(videos[kind], clips[kind]))
    for name, flaw in MODERATE.items():
        _show(f"right, with {name}", scored([flaw(video, dice=dice) for video in shown], every))
    for what in flaws.WRONG:
        _show(f"wrong: {what}", scored(*wrong(every, what)))
    typer.echo(f"direction of the flow is right: {right_directions(every, shown).mean():.3f}")
    some = list(range(0, len(every), max(len(every) // 48, 1)))[:48]
    for name in REWARDS:
        start = time.process_time()
        scored([shown[i] for i in some], [every[i] for i in some], [name])
        typer.echo(f"{name}: {time.process_time() - start:.2f} s of CPU time for {len(some)} clips")


def _show_what_is_left(
    folder: Path, clips: dict[str, list[Clip]], videos: dict[str, list[Frames]], dice: random.Random
) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(folder).eval()
    for kind, some in videos.items():
        _show(f"after the autoencoder: {kind}", scored(list(reconstructed(vae, np.stack(some))), clips[kind]))
    signs = [draw_clip("text", dice) for _ in clips["move"]]
    clean = np.stack([render_clip(clip, dice) for clip in signs])
    TEXT.load(torch.device("cpu"))
    for label, shown in (("clean", clean), ("after the autoencoder", reconstructed(vae, clean))):
        prompts = [Prompt(i, clip.caption, clip.source, clip.metadata) for i, clip in enumerate(signs)]
        scores = np.array(TEXT.score(RewardBatch(shown, prompts)), dtype=np.float64)
        typer.echo(f"{label}: signs ({len(signs)} clips): {scores.mean():.3f} of the letters are read")


def _show(label: str, scores: Scores) -> None:
    means = ", ".join(f"{name} {values.mean():.3f}" for name, values in scores.items())
    typer.echo(f"{label} ({len(scores['strict'])} clips): {means}")


if __name__ == "__main__":
    typer.run(main)
