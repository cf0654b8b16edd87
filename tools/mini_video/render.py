"""Draw a clip: each frame is a picture of tools/mini."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from tools.mini.render import render
from tools.mini_video.scenes import Clip

Frames = npt.NDArray[np.uint8]
"""[F, 64, 64, 3]"""


def render_clip(clip: Clip, dice: random.Random) -> Frames:
    """What the captions do not say (tint of the ground, place of the letters) is the same in all frames."""
    seed = dice.getrandbits(32)
    different = {id(scene): scene for scene in clip.scenes}  # frames that repeat are drawn once
    drawn = {key: np.asarray(render(scene, random.Random(seed))) for key, scene in different.items()}
    return np.stack([drawn[id(scene)] for scene in clip.scenes])
