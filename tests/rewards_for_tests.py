"""Rewards that misbehave, named by import path in test configs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def steady(images: list[np.ndarray], prompts: list[str], **meta: Any) -> list[float]:
    return [float(image[..., 0].mean()) / 255 for image in images]


def slow(images: list[np.ndarray], prompts: list[str], seconds: float) -> list[float]:
    time.sleep(seconds)
    return steady(images, prompts)


class After:
    """Behaves until ``calls`` batches were scored, then does ``what``."""

    def __init__(self, what: str, calls: int) -> None:
        self.what, self.calls = what, calls

    def applies_to(self, prompt: Any) -> bool:
        return True

    def load(self, device: Any) -> None:
        return None

    def score(self, batch: Any) -> list[float]:
        self.calls -= 1
        scores = steady(list(batch.images), [])
        if self.calls >= 0:
            return scores
        if self.what == "raise":
            raise RuntimeError("the reward model fell over")
        if self.what == "nan":
            return [*scores[:-1], float("nan")]
        if self.what == "short":
            return scores[:-1]
        if self.what == "hang":
            time.sleep(60)
        if self.what == "once":
            self.calls = 1 << 30
            raise RuntimeError("a passing fault")
        return scores


def two_arguments(images: list[np.ndarray], prompts: list[str]) -> list[float]:
    return steady(images, prompts)


def three_arguments(images: list[np.ndarray], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [float(row.get("bonus", 0)) for row in metadata]


class NoMethods:
    def score(self, batch: Any) -> list[float]:
        return []


class Picky(After):
    def __init__(self) -> None:
        raise RuntimeError("too picky")


class NoWeights(After):
    def __init__(self) -> None:
        super().__init__("nothing", 0)

    def load(self, device: Any) -> None:
        raise FileNotFoundError("weights.safetensors")


def darkness(images: list[np.ndarray], prompts: list[str]) -> list[float]:
    return [1 - float(image.mean()) / 255 for image in images]


def two_of_three(images: list[np.ndarray], prompts: list[str]) -> list[float | None]:
    """Has nothing to say about every third image or so."""
    return [float(image.mean()) / 255 if int(image.sum()) % 3 else None for image in images]
