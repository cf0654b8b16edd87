"""Training data of the mini video pipeline: clips with captions, deliberately imperfect, as those of tools/mini are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marble_rl.mini.shapes import SIZE
from tools.mini_video.flaws import OF_PIXELS, OF_SCENES, misdescribed
from tools.mini_video.render import Frames, render_clip
from tools.mini_video.scenes import FRAMES, SOURCES, Clip, draw_clip


@dataclass(frozen=True)
class Corpus:
    """N captioned clips."""

    videos: npt.NDArray[np.uint8]
    """[N, 13, 64, 64, 3]"""
    captions: tuple[str, ...]
    clips: tuple[Clip, ...]
    """What was drawn before it was spoilt, even if the caption is wrong."""


def make_corpus(
    count: int, seed: int, *, spoilt: float = 0.0, miscaptioned: float = 0.0, sources: Sequence[str] = SOURCES
) -> Corpus:
    """Draw ``count`` clips, the sources in turn. ``spoilt``, ``miscaptioned``: shares of clips and of captions."""
    dice = random.Random(seed)
    videos = np.empty((count, FRAMES, SIZE, SIZE, 3), dtype=np.uint8)
    clips, captions = [], []
    for i in range(count):
        source = sources[i % len(sources)]
        clip = draw_clip(source, dice)
        videos[i] = spoilt_frames(clip, dice) if dice.random() < spoilt else render_clip(clip, dice)
        clips.append(clip)
        wrong = dice.random() < miscaptioned
        captions.append(_other_caption(clip, dice) if wrong else clip.caption)
    return Corpus(videos, tuple(captions), tuple(clips))


def spoilt_frames(clip: Clip, dice: random.Random) -> Frames:
    """With one mild flaw."""
    severity = dice.uniform(0.1, 0.5)
    number = dice.randrange(len(OF_PIXELS) + len(OF_SCENES))
    if number < len(OF_PIXELS):
        return OF_PIXELS[number](render_clip(clip, dice), severity, dice)
    return render_clip(OF_SCENES[number - len(OF_PIXELS)](clip, severity, dice), dice)


def _other_caption(clip: Clip, dice: random.Random) -> str:
    """Another direction or speed where the caption names one, otherwise the caption of another clip."""
    near = misdescribed(clip, dice)
    return near if near != clip.caption else draw_clip(clip.source, dice).caption
