"""Stage 3: score images with every reward that applies to them.

Images go to a reward in batches of a fixed number of neighbouring rows (whole groups in training), so that a score
does not depend on how the rest of the work was divided. A thread of its own scores a batch while the next one is
sampled.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from marble_rl.config.schema import RewardConfig
from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.base import Images, Reward, RewardBatch, Scores, traits_of
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
        with self.in_background(names, prompts) as scoring:
            for batch in images.split(batch_size):
                scoring.add(batch)
            return scoring.finish()

    @contextmanager
    def in_background(self, names: Sequence[str], prompts: Sequence[Prompt]) -> Iterator[BackgroundScoring]:
        """Score batch after batch of the prompts' images while the caller goes on."""
        applicable = torch.tensor([[applies(n, self._rewards[n], p) for n in names] for p in prompts])
        scoring = BackgroundScoring(self._attempt, tuple(names), prompts, applicable)
        try:
            yield scoring
        finally:
            scoring.close()

    def _attempt(self, name: str, batch: RewardBatch) -> list[float]:
        config = self._configs[name]
        retries = traits_of(self._rewards[name]).retries if config.retries is None else config.retries
        for attempt in range(retries + 1):
            try:
                scores = _with_timeout(lambda: self._rewards[name].score(batch), config.timeout)
                return checked(scores, batch)
            except Exception as error:
                if attempt == retries:
                    prompt = batch.prompts[getattr(error, "row", 0)]
                    attempts = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
                    raise RewardFailed(
                        f"reward {name!r} failed after {attempts} on an image of prompt {prompt.index} "
                        f"({prompt.text!r}): {type(error).__name__}: {error}"
                    ) from error
        raise AssertionError("unreachable")


class BackgroundScoring:
    """Scores of N images that arrive in batches. One thread: reward models need not be safe for several."""

    def __init__(
        self,
        attempt: Callable[[str, RewardBatch], list[float]],
        names: tuple[str, ...],
        prompts: Sequence[Prompt],
        applicable: Tensor,
    ) -> None:
        self.seconds = 0.0
        """Spent in rewards so far."""
        self._attempt = attempt
        self._prompts = prompts
        self._table = RewardTable(names, torch.zeros(applicable.shape, dtype=torch.float64), applicable)
        self._rows = 0
        self._closed = False
        self._error: Exception | None = None
        self._batches: SimpleQueue[tuple[range, Images] | None] = SimpleQueue()
        # A daemon: a reward that hangs must not keep a program alive that was told to stop.
        self._thread = threading.Thread(target=self._work, args=(torch.get_num_threads(),), name="rewards", daemon=True)
        self._thread.start()

    def add(self, images: Tensor) -> None:
        """The next rows' images [B, H, W, 3] uint8. Raises if a reward has failed on earlier ones."""
        self._raise_error()
        rows = range(self._rows, self._rows + len(images))
        self._rows = rows.stop
        self._batches.put((rows, images.numpy()))

    def finish(self) -> RewardTable:
        """Wait for all scores."""
        self._batches.put(None)
        self._thread.join()
        self._raise_error()
        assert self._rows == len(self._prompts), f"{self._rows} images were given for {len(self._prompts)} prompts"
        return self._table

    def close(self) -> None:
        """Give up what has not been scored; a reward under way is left behind."""
        self._closed = True
        self._batches.put(None)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # OpenMP keeps this number for each thread
        while (batch := self._batches.get()) is not None:
            if self._closed or self._error is not None:
                continue
            try:
                self._score(*batch)
            except Exception as error:  # raised in the caller's thread
                self._error = error

    def _score(self, rows: range, pixels: Images) -> None:
        began = time.perf_counter()
        for column, name in enumerate(self._table.names):
            chosen = [row for row in rows if self._table.applicable[row, column]]
            if chosen:
                batch = RewardBatch(pixels[[row - rows.start for row in chosen]], [self._prompts[r] for r in chosen])
                self._table.values[chosen, column] = torch.tensor(self._attempt(name, batch), dtype=torch.float64)
        self.seconds += time.perf_counter() - began


class _BadScore(ValueError):
    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


def checked(scores: Scores, batch: RewardBatch) -> list[float]:
    """The scores, if there is one finite number for each image."""
    numbers = [float(score) for score in scores]  # type: ignore[arg-type]
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
