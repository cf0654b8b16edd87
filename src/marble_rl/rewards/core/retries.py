"""The retry policy: how many retries, the pauses between them, and when to give up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from marble_rl.errors import count_of
from marble_rl.rewards.core.base import seconds_to_deadline

T = TypeVar("T")


class AttemptFailed(RuntimeError):
    """An attempt that failed in a known way."""

    final = False
    """Whether a retry would fail as well, as with a wrong API key."""
    pause = 0.0
    """Seconds that the server asks us to wait before the next attempt."""


class AllAttemptsFailed(Exception):
    """No attempt succeeded."""

    def __init__(self, failures: Sequence[BaseException]) -> None:
        super().__init__(failures)
        self.failures = failures
        self.attempts = count_of(len(failures), "attempt")

    def reasons(self, describe: Callable[[BaseException], str] = str) -> str:
        """The different reasons. A reason that occurred several times, but not always, has its count."""
        reasons = [describe(failure) for failure in self.failures]
        counts = {reason: reasons.count(reason) for reason in reasons}
        return "; ".join(f"{r} ({n} times)" if 1 < n < len(reasons) else r for r, n in counts.items())


@dataclass(frozen=True)
class RetryPolicy:
    """Up to ``retries`` retries after a failure, with pauses that double."""

    retries: int
    backoff: float
    """Seconds before the first retry."""
    on_retry: Callable[[], None]
    """Called before each retry, to count it. May be called by several threads at once."""
    longest_pause: float = 60.0
    errors: type[BaseException] = AttemptFailed
    """Exceptions that are retried. Others are raised at once, and so is KeyboardInterrupt."""

    def call(
        self, attempt: Callable[[int], T], jitter: random.Random | None = None, stop: threading.Event | None = None
    ) -> T:
        """The result of the first of ``attempt(0)``, ``attempt(1)``, ... that succeeds.

        Raises AllAttemptsFailed after the last attempt, after a final failure, once ``stop`` is set, or if the pause
        would end after the deadline of this thread. ``jitter`` shortens each pause by up to half, at random, so that
        requests that failed together are not retried together.
        """
        failures: list[BaseException] = []
        for number in range(self.retries + 1):
            if number:
                self.on_retry()
            try:
                return attempt(number)
            except KeyboardInterrupt:
                raise
            except self.errors as error:
                failures.append(error)
            if number == self.retries or not self._wait(number, failures[-1], jitter, stop or threading.Event()):
                break
        raise AllAttemptsFailed(failures)

    def _wait(self, number: int, error: BaseException, jitter: random.Random | None, stop: threading.Event) -> bool:
        """Pause before the next attempt. Returns False if there must not be one."""
        pause = self.backoff * 2.0 ** min(number, 64) * (jitter.uniform(0.5, 1.0) if jitter else 1.0)
        if isinstance(error, AttemptFailed):
            if error.final:
                return False
            pause = max(pause, error.pause)
        pause = min(pause, self.longest_pause)
        left = seconds_to_deadline()
        return (left is None or pause < left) and not stop.wait(pause)
