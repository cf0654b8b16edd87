"""Rewards that misbehave, by import path: `tools.campaign.hostile_rewards:Bad`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

Scores = Any


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this error has no text")

    __repr__ = __str__


class OutsideTheTree(BaseException):
    """Not an `Exception`."""


def _raise(error: BaseException) -> NoReturn:
    raise error


def _recurse() -> Any:
    return _recurse()


def _after(action: Callable[[], object], scores: list[float]) -> list[float]:
    action()
    return scores


def _draw(images: Any) -> None:
    for image in images:
        image[:8] = 255


def _in_a_thread(error: BaseException) -> None:
    thread = threading.Thread(target=_raise, args=(error,))
    thread.start()
    thread.join()


STOPPING: dict[str, Callable[[Any, list[float]], Scores]] = {
    "raises": lambda images, scores: _raise(RuntimeError("the reward model fell over")),
    "raises 5 MB": lambda images, scores: _raise(RuntimeError("x" * 5_000_000)),
    "raises without text": lambda images, scores: _raise(Unprintable()),
    "sys.exit(0)": lambda images, scores: sys.exit(0),
    "sys.exit('text')": lambda images, scores: sys.exit("text"),
    "KeyboardInterrupt": lambda images, scores: _raise(KeyboardInterrupt()),
    "GeneratorExit": lambda images, scores: _raise(GeneratorExit()),
    "StopIteration": lambda images, scores: _raise(StopIteration(1)),
    "CancelledError": lambda images, scores: _raise(asyncio.CancelledError()),
    "MemoryError": lambda images, scores: _raise(MemoryError()),
    "BaseException": lambda images, scores: _raise(OutsideTheTree("outside")),
    "OSError": lambda images, scores: _raise(OSError(28, "No space left on device")),
    "recursion": lambda images, scores: _recurse(),
    "hangs": lambda images, scores: time.sleep(60),
    "draws": lambda images, scores: _after(lambda: _draw(images), scores),
    "None": lambda images, scores: None,
    "a number": lambda images, scores: 0.5,
    "too few": lambda images, scores: scores[:-1],
    "too many": lambda images, scores: [*scores, 0.5],
    "none": lambda images, scores: [],
    "nan": lambda images, scores: [float("nan"), *scores[1:]],
    "inf": lambda images, scores: [float("inf"), *scores[1:]],
    "1e308": lambda images, scores: [1e308, -1e308, *scores[2:]],
    "nested": lambda images, scores: [[score] for score in scores],
    "column": lambda images, scores: np.array(scores)[:, None],
    "texts": lambda images, scores: [str(score) for score in scores],
    "a text": lambda images, scores: "1" * len(scores),
    "bytes": lambda images, scores: bytes(len(scores)),
    "dict": lambda images, scores: dict.fromkeys(range(len(scores)), 0.5),
    "set": lambda images, scores: set(range(len(scores))),
    "generator of texts": lambda images, scores: (str(score) for score in scores),
    "complex": lambda images, scores: [complex(score, 1) for score in scores],
    "objects": lambda images, scores: [object() for _ in scores],
    "dates": lambda images, scores: np.array(["2026-01-01"] * len(scores), dtype="datetime64"),
    "meta": lambda images, scores: torch.empty(len(scores), device="meta"),
    "complex tensor": lambda images, scores: torch.zeros(len(scores), dtype=torch.complex64),
}
"""What must stop the run, with the reward named."""

HARMLESS: dict[str, Callable[[Any, list[float]], Scores]] = {
    "nothing": lambda images, scores: scores,
    "tuple": lambda images, scores: tuple(scores),
    "array": lambda images, scores: np.array(scores),
    "tensor": lambda images, scores: torch.tensor(scores, dtype=torch.float64, requires_grad=True),
    "seeds": lambda images, scores: _after(lambda: (torch.manual_seed(1), np.random.seed(1)), scores),
    "no gradients": lambda images, scores: _after(lambda: torch.set_grad_enabled(False), scores),
    "inference mode": lambda images, scores: _after(lambda: torch.inference_mode().__enter__(), scores),
    "changes the folder": lambda images, scores: _after(lambda: os.chdir("/"), scores),
    "prints": lambda images, scores: _after(lambda: print("x" * 100_000), scores),
    "warns": lambda images, scores: _after(lambda: warnings.warn("careful", stacklevel=1), scores),
    "raises in a thread": lambda images, scores: _after(lambda: _in_a_thread(SystemExit(0)), scores),
    "numpy raises": lambda images, scores: _after(lambda: np.seterr(all="raise"), scores),
    "changes a copy": lambda images, scores: _after(lambda: _draw(np.array(images)), scores),
    "closes stdout": lambda images, scores: _after(lambda: sys.stdout.close(), scores),
}
"""What must not change the result."""


class Bad:
    """The mean of the red channel; ``what`` happens at ``where``, from call number ``after`` on."""

    def __init__(self, what: str = "nothing", where: str = "score", after: int = 0) -> None:
        self.what, self.where, self.after = what, where, after
        self._at("constructor")

    def _at(self, place: str) -> None:
        if place == self.where:
            STOPPING[self.what](np.zeros((2, 8, 8, 3), dtype=np.uint8), [0.5, 0.5])

    def applies_to(self, prompt: Any) -> bool:
        self._at("applies_to")
        return True

    def load(self, device: Any) -> None:
        self._at("load")

    def score(self, batch: Any) -> Scores:
        scores = [float(image[..., 0].mean()) / 255 for image in batch.images]
        self.after -= 1
        if self.where != "score" or self.after >= 0:
            return scores
        return {**STOPPING, **HARMLESS}[self.what](batch.images, scores)
