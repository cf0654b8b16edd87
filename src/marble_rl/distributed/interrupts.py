"""Ctrl-C and SIGTERM: note them, finish the step, save, then stop. A second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from marble_rl.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Notes the first signal while the context is open."""

    def __init__(
        self,
        notice: Callable[[str], None],
        doing: str = "finishing this step, then saving",
        agree: Callable[[int], int] = lambda signum: signum,
        launched: bool = False,
    ) -> None:
        """``agree`` makes one signal (0 for none) of those that each process of the run has noted. ``launched``: the
        signals come through a launcher, perhaps twice; it has its own way to end a process at once."""
        self._received: int | None = None
        self._notice = notice
        self._doing = doing
        self._agree = agree
        self._launched = launched
        self._previous: dict[int, Any] = {}

    def pending(self) -> bool:
        """Whether the run was asked to stop. In a distributed run all processes ask this at the same point."""
        agreed = self._agree(self._received or 0)
        if agreed:  # else a signal may have come while the others were asked, and is theirs to know the next time
            self._received = agreed
        return bool(agreed)

    def stop(self, message: str) -> NoReturn:
        """End the run with the exit code of the signal noted."""
        assert self._received is not None
        stop = Interrupted(self._received, message)
        stop.shared = True
        raise stop

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._received is not None:
            if self._launched:
                return
            raise KeyboardInterrupt
        self._received = signum
        name = signal.Signals(signum).name
        self._notice(f"{name}: {self._doing}." + ("" if self._launched else " Once more stops at once."))
