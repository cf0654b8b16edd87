"""Stage 3: score images with every reward that applies to them.

Images go to a reward in batches of a fixed number of neighbouring rows (whole groups in training), so that a score
does not depend on how the rest of the work was divided.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from marble_rl.config.schema import RewardConfig
from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.base import Images, Reward, RewardBatch
from marble_rl.types import Prompt, RewardTable

T = TypeVar("T")


def applies(name: str, reward: Reward, prompt: Prompt) -> bool:
    """The prompt file decides first, then the reward itself."""
    return (prompt.rewards is None or name in prompt.rewards) and reward.applies_to(prompt)


class Scorer:
    """The rewards of a run, ready to score."""

    def __init__(self, configs: Sequence[RewardConfig], rewards: Mapping[str, Reward]) -> None:
        self._configs = {config.name: config for config in configs}
        self._rewards = dict(rewards)

    @property
    def names(self) -> tuple[str, ...]:
        """All rewards; after `load`, those that could be loaded."""
        return tuple(self._rewards)

    def load(self, device: torch.device) -> list[str]:
        """Load every reward's weights. Optional rewards that cannot be loaded are left out, and remarked on."""
        remarks = []
        for name, reward in list(self._rewards.items()):
            try:
                reward.load(device)
            except Exception as error:
                message = f"{name!r} cannot be loaded: {type(error).__name__}: {error}"
                if not self._configs[name].optional:
                    raise InputError(f"rewards: {message}") from error
                del self._rewards[name]
                remarks.append(f"left out: optional reward {message}")
        return remarks

    def score(self, names: Sequence[str], images: Tensor, prompts: Sequence[Prompt], batch_size: int) -> RewardTable:
        """Scores of images [N, H, W, 3] uint8 by the rewards named, ``batch_size`` neighbouring rows at a time."""
        values = torch.zeros(len(prompts), len(names), dtype=torch.float64)
        applicable = torch.tensor([[applies(n, self._rewards[n], p) for n in names] for p in prompts])
        pixels: Images = images.numpy()
        for column, name in enumerate(names):
            for start in range(0, len(prompts), batch_size):
                rows = [r for r in range(start, min(start + batch_size, len(prompts))) if applicable[r, column]]
                if rows:
                    batch = RewardBatch(pixels[rows], [prompts[r] for r in rows])
                    values[rows, column] = torch.tensor(self._attempt(name, batch), dtype=torch.float64)
        return RewardTable(tuple(names), values, applicable)

    def _attempt(self, name: str, batch: RewardBatch) -> list[float]:
        config = self._configs[name]
        for attempt in range(config.retries + 1):
            try:
                scores = _with_timeout(lambda: self._rewards[name].score(batch), config.timeout)
                return checked(scores, batch)
            except Exception as error:
                if attempt == config.retries:
                    prompt = batch.prompts[getattr(error, "row", 0)]
                    attempts = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
                    raise RewardFailed(
                        f"reward {name!r} failed after {attempts} on an image of prompt {prompt.index} "
                        f"({prompt.text!r}): {type(error).__name__}: {error}"
                    ) from error
        raise AssertionError("unreachable")


class _BadScore(ValueError):
    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


def checked(scores: Sequence[float], batch: RewardBatch) -> list[float]:
    """The scores, if there is one finite number for each image."""
    numbers = [float(score) for score in scores]
    if len(numbers) != len(batch.prompts):
        raise _BadScore(f"returned {len(numbers)} scores for {len(batch.prompts)} images")
    for row, number in enumerate(numbers):
        if not math.isfinite(number):
            raise _BadScore(f"returned {number} for image {row} of its batch", row)
    return numbers


def _with_timeout(call: Callable[[], T], seconds: float | None) -> T:
    """Run in a thread of its own where a timeout is set; a call that hangs is left behind, not waited for."""
    if seconds is None:
        return call()
    outcome: list[tuple[T | None, Exception | None]] = []

    def target() -> None:
        try:
            outcome.append((call(), None))
        except Exception as error:  # handed to the caller's thread below
            outcome.append((None, error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
