"""Training data of the mini pipeline: scenes with captions, deliberately imperfect.

A base model that is already perfect has nothing to learn from rewards, and one at chance level cannot learn. So a part
of the data is spoilt, in ways that a reward can detect: blur, low contrast, crooked shapes, captions of another
picture.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from marble_rl.mini.shapes import SIZE
from tools.mini.flaws import blurred, crooked, pale
from tools.mini.render import render
from tools.mini.scenes import SOURCES, Scene, draw_scene

Pictures = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """N captioned pictures."""

    images: Pictures
    """[N, 64, 64, 3]"""
    captions: tuple[str, ...]
    scenes: tuple[Scene, ...]
    """What the pictures show, even if the caption is wrong."""


def make_corpus(
    count: int, seed: int, *, spoilt: float = 0.0, miscaptioned: float = 0.0, sources: Sequence[str] = SOURCES
) -> Corpus:
    """Draw ``count`` scenes, the sources in turn. ``spoilt``, ``miscaptioned``: shares of pictures and of captions."""
    dice = random.Random(seed)
    images = np.empty((count, SIZE, SIZE, 3), dtype=np.uint8)
    scenes, captions = [], []
    for i in range(count):
        source = sources[i % len(sources)]
        scene = draw_scene(source, dice)
        picture = render(scene, dice)
        images[i] = np.asarray(spoil(picture, dice) if dice.random() < spoilt else picture)
        scenes.append(scene)
        captions.append(draw_scene(source, dice).caption if dice.random() < miscaptioned else scene.caption)
    return Corpus(images, tuple(captions), tuple(scenes))


def spoil(picture: Image.Image, dice: random.Random) -> Image.Image:
    """Mild blur, low contrast or crooked shapes."""
    flaw = dice.choice((blurred, pale, crooked))
    return flaw(picture, dice.uniform(0.1, 0.5), dice)
