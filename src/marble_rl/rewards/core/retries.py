"""The retry policy: how many retries, the pauses between them, and when to give up."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from marble_rl.errors import as_message, count_of, text_of
from marble_rl.rewards.core.base import seconds_to_deadline

T = TypeVar("T")

LOG = logging.getLogger(__name__)


class AttemptFailed(RuntimeError):
    """An attempt that failed in a known way. Its message may quote a server, so it is bounded."""

    final = False
    """Whether a retry would fail as well, as with a wrong API key."""
    unreachable = False
    """Whether the server did not answer at all, as while it restarts. Such attempts are repeated for some time, however
    many they are."""
    pause = 0.0
    """Seconds that the server asks us to wait before the next attempt."""

    def __init__(self, message: str = "") -> None:
        super().__init__(as_message(message))


class AllAttemptsFailed(Exception):
    """No attempt succeeded."""

    def __init__(self, failures: Sequence[Exception]) -> None:
        super().__init__(failures)
        self.failures = failures
        self.attempts = count_of(len(failures), "attempt")

    def reasons(self, describe: Callable[[Exception], str] = text_of) -> str:
        """The different reasons. A reason that occurred several times, but not always, has its count."""
        reasons = [describe(failure) for failure in self.failures]
        counts = {reason: reasons.count(reason) for reason in reasons}
        return "; ".join(f"{r} ({n} times)" if 1 < n < len(reasons) else r for r, n in counts.items())


class Outage:
    """The time in which a server cannot be reached, mentioned at its beginning and at its end. Several threads may
    share one."""

    def __init__(self, of: str, wait: float) -> None:
        """``of``: what the server serves, for messages. ``wait``: seconds after which waiting ends."""
        self.of = of
        self.wait = wait
        self._began: float | None = None
        self._lock = threading.Lock()

    def begin(self, reason: Exception) -> None:
        with self._lock:
            if self._began is None:
                self._began = time.monotonic()
                LOG.warning(f"waiting up to {self.wait:g} s for the server of {self.of}: {reason}")

    def end(self) -> None:
        with self._lock:
            if self._began is not None:
                LOG.warning(f"the server of {self.of} is back after {time.monotonic() - self._began:.0f} s")
                self._began = None

    def give_up(self) -> None:
        with self._lock:
            self._began = None


@dataclass(frozen=True)
class RetryPolicy:
    """Up to ``retries`` retries after a failure, with pauses that double. While a server is unreachable, further ones
    until ``outage.wait`` is over."""

    retries: int
    backoff: float
    """Seconds before the first retry."""
    on_retry: Callable[[], None]
    """Called before each retry, to count it. May be called by several threads at once."""
    longest_pause: float = 60.0
    errors: type[Exception] = AttemptFailed
    """Exceptions that are retried. Others are raised at once."""

    def call(
        self,
        attempt: Callable[[int], T],
        jitter: random.Random | None = None,
        stop: threading.Event | None = None,
        outage: Outage | None = None,
    ) -> T:
        """The result of the first of ``attempt(0)``, ``attempt(1)``, ... that succeeds.

        Raises AllAttemptsFailed after the last attempt, after a final failure, once ``stop`` is set, or if the pause
        would end after the deadline of this thread. ``jitter`` shortens each pause by up to half, at random, so that
        requests that failed together are not retried together.
        """
        failures: list[Exception] = []
        began = time.monotonic()
        while True:
            try:
                result = attempt(len(failures))
            except self.errors as error:
                failures.append(error)
            else:
                if outage is not None:
                    outage.end()
                return result
            if not self._may_retry(failures, time.monotonic() - began, outage):
                break
            if not self._wait(len(failures) - 1, failures[-1], jitter, stop or threading.Event()):
                break
            self.on_retry()
        raise AllAttemptsFailed(failures)

    def _may_retry(self, failures: Sequence[Exception], seconds: float, outage: Outage | None) -> bool:
        last = failures[-1]
        if getattr(last, "final", False):
            return False
        if outage is None or not getattr(last, "unreachable", False):
            answered = [f for f in failures if outage is None or not getattr(f, "unreachable", False)]
            return len(answered) <= self.retries
        if len(failures) > self.retries:
            if seconds >= outage.wait:
                outage.give_up()
                return False
            outage.begin(last)
        return True

    def _wait(self, number: int, error: Exception, jitter: random.Random | None, stop: threading.Event) -> bool:
        """Pause before the next attempt. Returns False if there must not be one."""
        pause = self.backoff * 2.0 ** min(number, 64) * (jitter.uniform(0.5, 1.0) if jitter else 1.0)
        pause = min(max(pause, getattr(error, "pause", 0.0)), self.longest_pause)
        left = seconds_to_deadline()
        return (left is None or pause < left) and not stop.wait(pause)
