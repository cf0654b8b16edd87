"""Tiny pipelines with random weights, in diffusers' real folder format: for tests and for trying things out.

python -m marble_rl.models.tiny build/tiny-sd3
python -m marble_rl.models.tiny build/tiny-wan --family wan

The same seed gives the same weights. The last layer of a new transformer is zero or nearly so, and every velocity would
be 0. Here it gets random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from marble_rl.models.tiny.flux import build_tiny_flux
from marble_rl.models.tiny.qwen_image import build_tiny_qwen_image
from marble_rl.models.tiny.sd3 import build_tiny_sd3, tiny_vae
from marble_rl.models.tiny.wan import build_tiny_wan

BUILDERS: dict[str, Callable[[Path], None]] = {
    "sd3": build_tiny_sd3,
    "flux": build_tiny_flux,
    "qwen_image": build_tiny_qwen_image,
    "wan": build_tiny_wan,
}

__all__ = ["BUILDERS", "build_tiny_flux", "build_tiny_qwen_image", "build_tiny_sd3", "build_tiny_wan", "tiny_vae"]
