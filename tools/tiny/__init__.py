"""Tiny pipelines with random weights, in diffusers' real folder format: for tests and for trying things out.

python -m tools.tiny build/tiny-sd3
python -m tools.tiny build/tiny-wan --family wan

The same seed gives the same weights. The last layer of a new transformer is zero or nearly so, and every velocity would
be 0. Here it gets random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.tiny.flux import build_tiny_flux
from tools.tiny.qwen_image import build_tiny_qwen_image
from tools.tiny.sd3 import build_tiny_sd3
from tools.tiny.wan import build_tiny_wan, build_tiny_wan22_5b, build_tiny_wan22_14b

BUILDERS: dict[str, Callable[[Path], None]] = {
    "sd3": build_tiny_sd3,
    "flux": build_tiny_flux,
    "qwen_image": build_tiny_qwen_image,
    "wan": build_tiny_wan,
    "wan22_5b": build_tiny_wan22_5b,
    "wan22_14b": build_tiny_wan22_14b,
}

__all__ = [
    "BUILDERS",
    "build_tiny_flux",
    "build_tiny_qwen_image",
    "build_tiny_sd3",
    "build_tiny_wan",
    "build_tiny_wan22_5b",
    "build_tiny_wan22_14b",
]
