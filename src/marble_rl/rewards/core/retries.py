"""One policy for repeated attempts: how many, after which pause, and until when."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from marble_rl.rewards.core.base import seconds_to_deadline

T = TypeVar("T")


class AttemptFailed(RuntimeError):
    """An attempt that failed in a known way."""

    final = False
    """Whether every other attempt would fail as well, as with a wrong key."""
    pause = 0.0
    """Seconds that a server asked to wait before the next attempt."""


class AttemptsFailed(Exception):
    """No attempt succeeded."""

    def __init__(self, failures: Sequence[BaseException]) -> None:
        super().__init__(failures)
        self.failures = failures
        self.attempts = "1 attempt" if len(failures) == 1 else f"{len(failures)} attempts"

    def reasons(self, describe: Callable[[BaseException], str] = str) -> str:
        """Each different reason once, with its count where others occurred as well."""
        reasons = [describe(failure) for failure in self.failures]
        counts = {reason: reasons.count(reason) for reason in reasons}
        return "; ".join(f"{r} ({n} times)" if 1 < n < len(reasons) else r for r, n in counts.items())


@dataclass(frozen=True)
class RetryPolicy:
    """Up to ``retries`` further attempts after a failure, with pauses that double."""

    retries: int
    backoff: float
    """Seconds before the first further attempt."""
    on_retry: Callable[[], None]
    """Called before each further attempt, to count it. May be called by several threads at once."""
    longest_pause: float = 60.0
    errors: type[BaseException] = AttemptFailed
    """Failures after which another attempt is made; others are raised at once, as is KeyboardInterrupt."""

    def call(
        self, attempt: Callable[[int], T], jitter: random.Random | None = None, stop: threading.Event | None = None
    ) -> T:
        """The result of the first of ``attempt(0)``, ``attempt(1)``, ... that succeeds.

        Raises AttemptsFailed after the last attempt or a final failure, once ``stop`` is set, or if the pause would
        outlast the deadline of this thread. ``jitter`` takes up to half off each pause, so that requests that failed
        together do not come back all at once.
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
        raise AttemptsFailed(failures)

    def _wait(self, number: int, error: BaseException, jitter: random.Random | None, stop: threading.Event) -> bool:
        """Pause before the next attempt; whether there is to be one."""
        pause = self.backoff * 2.0 ** min(number, 64) * (jitter.uniform(0.5, 1.0) if jitter else 1.0)
        if isinstance(error, AttemptFailed):
            if error.final:
                return False
            pause = max(pause, error.pause)
        pause = min(pause, self.longest_pause)
        left = seconds_to_deadline()
        return (left is None or pause < left) and not stop.wait(pause)
