"""Rewards that misbehave or are of a rare kind, named by import path in test configs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import numpy as np

from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits
from marble_rl.types import Prompt


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
        if self.what == "exit":
            sys.exit(1)
        if self.what == "die":
            os._exit(1)
        if self.what == "cancel":
            raise asyncio.CancelledError("cancelled")
        if self.what == "interrupt":
            raise KeyboardInterrupt
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


class Sleeping(After):
    """Behaves until ``calls`` batches were scored, then takes ``seconds`` for each; on one ``rank`` alone, if given."""

    def __init__(self, calls: int, seconds: float, rank: str | None = None) -> None:
        super().__init__("nothing", calls)
        self.seconds = seconds if rank in (None, os.environ.get("RANK")) else 0.0

    def score(self, batch: Any) -> list[float]:
        scores = super().score(batch)
        if self.calls < 0:
            time.sleep(self.seconds)
        return scores


def two_arguments(images: list[np.ndarray], prompts: list[str]) -> list[float]:
    return steady(images, prompts)


def three_arguments(images: list[np.ndarray], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [float(row.get("bonus", 0)) for row in metadata]


def images_only(images: list[np.ndarray]) -> list[float]:
    return steady(images, [])


def prompts_by_name_only(images: list[np.ndarray], *, prompts: list[str]) -> list[float]:
    return steady(images, prompts)


def images_and_others(images: list[np.ndarray], **meta: Any) -> list[float]:
    return steady(images, [])


def anything(*batch: Any, **meta: Any) -> list[float]:
    return steady(*batch)


def goes_elsewhere(images: list[np.ndarray], prompts: list[str]) -> list[float]:
    """As some libraries do, which look for their files in the current folder."""
    os.chdir("/")
    return darkness(images, prompts)


class NeedsTarget(RewardBase):
    """Expects of every prompt what not every prompt has."""

    def applies_to(self, prompt: Prompt) -> bool:
        return bool(prompt.metadata["target"])

    def score(self, batch: RewardBatch) -> list[float]:
        return [1.0] * len(batch.prompts)


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


class RedShare(RewardBase):
    """Share of red; silent on black pictures. All its traits differ from the defaults, but for what it scores."""

    def __init__(self, batch_size: int | None = 2) -> None:
        self.traits = Traits(
            batch_size=batch_size,
            device="cpu",
            precision="bfloat16",
            range=(0.0, 1.0),
            higher_is_better=False,
            deterministic=True,
            concurrency=3,
            retries=5,
        )
        self.loaded: Any = None
        self.calls: list[list[str]] = []

    def applies_to(self, prompt: Prompt) -> bool:
        return "red" in prompt.text

    def load(self, device: Any) -> None:
        self.loaded = device

    def score(self, batch: RewardBatch) -> list[float | None]:
        self.calls.append([prompt.text for prompt in batch.prompts])
        return [float(image[..., 0].mean()) / 255 if image.any() else None for image in batch.images]


class AsSlowAsSampling(After):
    """Takes nearly as long over a batch as the batch before it took to be sampled, however busy the machine is."""

    def __init__(self) -> None:
        super().__init__("nothing", 0)
        self.called = time.perf_counter()
        self.seconds = 0.05

    def score(self, batch: Any) -> list[float]:
        since, self.called = time.perf_counter() - self.called, time.perf_counter()
        if since < 3 * self.seconds:  # more: a training step lies between
            self.seconds = 0.92 * since
        time.sleep(self.seconds)
        return steady(list(batch.images), [])


class Fickle(After):
    """Says that it is deterministic, and is not."""

    traits = Traits(deterministic=True)

    def __init__(self) -> None:
        super().__init__("nothing", 0)

    def score(self, batch: Any) -> list[float]:
        self.calls += 1
        return [float(self.calls)] * len(batch.prompts)


class FailsElsewhere(After):
    """Behaves, but for the second of several processes, where it fails after ``calls`` batches."""

    def __init__(self, calls: int) -> None:
        super().__init__("raise" if os.environ.get("RANK") == "1" else "nothing", calls)


class BreaksExchange(After):
    """Behaves until ``calls`` batches were scored. Then, on one ``rank``, no table of scores can be exchanged any
    more: the error is ``text``."""

    def __init__(self, calls: int, rank: str, text: str) -> None:
        super().__init__("nothing", calls)
        self.text = text if rank == os.environ.get("RANK") else None

    def score(self, batch: Any) -> list[float]:
        scores = super().score(batch)
        if self.calls < 0 and self.text is not None:
            import torch.distributed

            def failing(values: list[Any], value: Any, **options: Any) -> None:
                raise torch.distributed.DistBackendError(self.text)

            torch.distributed.all_gather_object = failing
        return scores


def greedy(images: list[np.ndarray], prompts: list[str]) -> list[float]:
    """More than any machine has."""
    return list(np.empty(1 << 60, np.uint8))


class QuotedOnly(RewardBase):
    """Applies to prompts with text in quotes, as rewards that read text do."""

    def applies_to(self, prompt: Prompt) -> bool:
        return '"' in prompt.text

    def score(self, batch: RewardBatch) -> list[float]:
        return steady(list(batch.images), [])


def constant(images: list[np.ndarray], prompts: list[str]) -> list[float]:
    return [0.5] * len(images)


def in_words(images: list[np.ndarray], prompts: list[str]) -> list[str]:
    return ["0.5"] * len(images)


def one_word(images: list[np.ndarray], prompts: list[str]) -> str:
    return "good"


class FindsBlue(RewardBase):
    traits = Traits(range=(0.0, 1.0))

    def score(self, batch: RewardBatch) -> list[float]:
        return [float((image == (0, 0, 255)).all()) for image in batch.images]


def paints(images: list[np.ndarray], prompts: list[str]) -> list[float]:
    """Draws what it found into the images, as one does with OpenCV."""
    for image in images:
        image[:4, :4] = 255
    return steady(images, prompts)


class Exits(After):
    """Ends the program without an error, in one of its methods."""

    def __init__(self, where: str) -> None:
        super().__init__("nothing", 0)
        self.where = where

    def _exit_in(self, method: str) -> None:
        if self.where == method:
            sys.exit(0)

    def applies_to(self, prompt: Any) -> bool:
        self._exit_in("applies_to")
        return True

    def load(self, device: Any) -> None:
        self._exit_in("load")

    def score(self, batch: Any) -> list[float]:
        self._exit_in("score")
        return super().score(batch)


class OddTraits(After):
    def __init__(self) -> None:
        super().__init__("nothing", 0)
        self.traits = {"range": (0, 1)}
