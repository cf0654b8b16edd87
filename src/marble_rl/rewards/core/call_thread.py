"""Calls that can be given up: they are made in another thread, and the caller waits for so long and no longer."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from marble_rl.devices import state_of_thread
from marble_rl.errors import Escaped, described
from marble_rl.rewards.core.base import deadline_in

T = TypeVar("T")

LOG = logging.getLogger(__name__)
FIRST_NOTICE = 60.0
"""Seconds after which a call that has not returned is mentioned; again after twice that time, and so on."""

_own = threading.local()
"""The call thread of each thread that makes calls, so that one after the other is made by the same thread."""


def call_within(call: Callable[[], T], timeout: float | None, name: str) -> T:
    """The result of the call. Raises TimeoutError after ``timeout`` seconds; the call then goes on running, but nobody
    waits for it any more. What the call raises is raised here, and is an Exception: in place of a SystemExit or the
    like, an Escaped. ``name``: of the reward, for messages."""
    thread: CallThread | None = getattr(_own, "thread", None)
    if thread is None:
        thread = CallThread()
    job = Job(call, timeout)
    _own.thread = None  # while it is busy, also after a timeout or Ctrl-C, another call gets another one
    thread.start(job)
    if not _wait_for(job, timeout, name):
        raise TimeoutError(f"no answer within {timeout:g} seconds")
    _own.thread = thread
    if job.error is not None:
        raise job.error
    return job.result  # type: ignore[no-any-return]


@dataclass
class Job:
    """One call and what came of it."""

    call: Callable[[], Any]
    timeout: float | None
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None

    def make(self) -> None:
        try:
            with deadline_in(self.timeout):
                self.result = self.call()
        except Exception as error:  # handed to the thread that waits
            self.error = error
        except BaseException as error:  # no signal is raised in this thread: the reward called sys.exit, or the like
            self.error = Escaped(described(error))
            self.error.__cause__ = error
        self.done.set()


class CallThread:
    """A daemon thread that makes one call after the other, and ends once nobody refers to this object."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        threading.Thread(target=_make_calls, args=(self._jobs, state_of_thread()), name="reward", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def start(self, job: Job) -> None:
        self._jobs.put(job)


def _make_calls(jobs: SimpleQueue[Job | None], take_over: Callable[[], None]) -> None:
    take_over()
    while (job := jobs.get()) is not None:
        job.make()
        del job  # while it waits for the next one, it must not keep the images of this one


def _wait_for(job: Job, timeout: float | None, name: str) -> bool:
    """Whether the call returned within the timeout. A wait that takes long is mentioned."""
    began, limit = time.monotonic(), math.inf if timeout is None else timeout
    notice = FIRST_NOTICE
    while (waited := time.monotonic() - began) < limit:
        if job.done.wait(min(notice, limit) - waited):
            return True
        if notice <= time.monotonic() - began < limit:
            ends = "no timeout is set" if timeout is None else f"timeout after {timeout:g} s"
            LOG.warning(f"waiting for reward {name!r} for {notice:g} s ({ends})")
            notice *= 2
    return job.done.is_set()
