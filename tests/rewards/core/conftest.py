from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[float], None]]:
    """Presses Ctrl-C after so many seconds."""
    timers: list[threading.Timer] = []

    def press(seconds: float) -> None:
        main = threading.main_thread().ident
        timers.append(threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT)))
        timers[-1].start()

    yield press
    for timer in timers:
        timer.cancel()
