"""Scoring while the next images are sampled.

Rewards are called by worker threads. A lane is a queue of calls with its own worker threads. Rewards on the same device
share a lane with one thread: reward models need not be thread-safe, and two at once are not faster on one device. A
reward that waits for other machines has a lane of its own, with as many threads as batches may be in flight.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from marble_rl.devices import state_of_thread
from marble_rl.distributed.interrupts import seconds_since_stop
from marble_rl.errors import RewardFailed, RewardsAbandoned, count_of
from marble_rl.rewards.core.base import Images, NotedScore, RewardBatch
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.types import Prompt, RewardTable

GRACE = 10.0
"""Seconds that a run waits for rewards after Ctrl-C or SIGTERM. Then it gives them up, and the step with them."""
POLL = 0.2
"""Seconds between two looks at whether it makes sense to wait on."""


class PendingScores:
    """The scores of N images that arrive in batches, computed in the background."""

    def __init__(self, rewards: Sequence[CalledReward], prompts: Sequence[Prompt], applicable: Tensor) -> None:
        self._rewards = rewards
        self._prompts = prompts
        names = tuple(reward.name for reward in rewards)
        # NaN until scored: a missing score must not look like a score of 0.
        values = torch.zeros(applicable.shape, dtype=torch.float64).masked_fill(applicable, math.nan)
        self._table = RewardTable(names, values, applicable)
        self._notes: list[dict[str, str]] = [{} for _ in prompts]
        self._rows = 0
        self._closed = False
        self._error: Exception | None = None
        self._calling: list[str] = []
        """Names of the rewards that are being called; one more than once, if its lane has several threads"""
        self._lanes: dict[str, Lane] = {}
        for reward in rewards:
            if _lane(reward) not in self._lanes:
                self._lanes[_lane(reward)] = Lane(reward.traits.concurrency or 1)

    def add(self, images: Tensor) -> None:
        """Queue the images [B, H, W, 3] uint8 of the next rows. Raises if a reward has failed on earlier ones."""
        self._raise_error()
        rows = range(self._rows, self._rows + len(images))
        self._rows = rows.stop
        pixels = images.numpy()
        for column, reward in enumerate(self._rewards):
            self._lanes[_lane(reward)].put(partial(self._score, column, rows, pixels))

    def finish(self) -> RewardTable:
        """Wait for all scores and return them."""
        began = time.monotonic()
        for lane in self._lanes.values():
            lane.finish(lambda: self._check_waiting(began))
        self._raise_error()
        assert self._rows == len(self._prompts), f"{self._rows} images were given for {len(self._prompts)} prompts"
        self._check_complete()
        return self._table

    def notes(self, row: int) -> dict[str, str]:
        """By reward, what it noted on the image in this row; known once `finish` returned."""
        return self._notes[row]

    def close(self) -> None:
        """Stop. Batches that wait in a queue are not scored, and calls in flight are not waited for."""
        self._closed = True
        for lane in self._lanes.values():
            lane.close()

    def _check_waiting(self, began: float) -> None:
        """Raise if a reward has failed, or if the process was asked to stop and has waited long enough since then and
        since it ``began`` to wait."""
        self._raise_error()
        asked = seconds_since_stop()
        if asked is not None and min(asked, time.monotonic() - began) > GRACE:
            names = " and ".join(sorted({repr(name) for name in self._calling}))
            raise RewardsAbandoned(f"gave up waiting for reward {names}" if names else "gave up waiting for rewards")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _check_complete(self) -> None:
        for name, column in zip(self._table.names, self._table.values.unbind(1), strict=True):
            missing = column.isnan().nonzero().flatten().tolist()
            if missing:
                prompt = self._prompts[missing[0]]
                raise RewardFailed(
                    f"reward {name!r} left {count_of(len(missing), 'image')} without a score, the first of prompt "
                    f"{prompt.index} ({prompt.text!r})"
                )

    def _score(self, column: int, rows: range, pixels: Images) -> None:
        """Runs in a lane's thread. No two calls write to the same cells of the table."""
        if self._closed or self._error is not None:
            return
        name = self._rewards[column].name
        self._calling.append(name)
        try:
            self._fill(column, rows, pixels)
        except Exception as error:  # raised in the caller's thread; here it would end the lane unseen
            self._error = self._error or error
        finally:
            self._calling.remove(name)

    def _fill(self, column: int, rows: range, pixels: Images) -> None:
        chosen = [row for row in rows if self._table.applicable[row, column]]
        if not chosen:
            return
        images = pixels if len(chosen) == len(rows) else pixels[[row - rows.start for row in chosen]]
        scores = self._rewards[column].score(RewardBatch(images, [self._prompts[row] for row in chosen]))
        for row, score in zip(chosen, scores, strict=True):
            self._table.values[row, column] = 0.0 if score is None else score
            self._table.applicable[row, column] = score is not None
            if isinstance(score, NotedScore):
                self._notes[row][self._table.names[column]] = score.note


def _lane(reward: CalledReward) -> str:
    return str(reward.device) if reward.traits.concurrency is None else f"reward {reward.name}"


class Lane:
    """A queue of jobs and its worker threads. They are daemon threads, so that a reward that hangs cannot keep the
    program from ending, as it would in a ThreadPoolExecutor."""

    def __init__(self, threads: int, name: str = "rewards") -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(state_of_thread(),), name=name, daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """No more jobs will be put. The threads end after the jobs in the queue."""
        for _ in self._threads:
            self._jobs.put(None)

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until all jobs are done, or until ``check``, which is called again and again, raises."""
        self.close()
        for thread in self._threads:
            thread.join(POLL)
            while thread.is_alive():
                check()
                thread.join(POLL)

    def _work(self, take_over: Callable[[], None]) -> None:
        take_over()
        while (job := self._jobs.get()) is not None:
            job()
