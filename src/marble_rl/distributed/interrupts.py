"""Ctrl-C and SIGTERM: remember the signal, finish the step, save, then stop. A second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from marble_rl.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Remembers the first signal while the context is open."""

    def __init__(
        self,
        notice: Callable[[str], None],
        doing: str = "finishing this step, then saving",
        agree: Callable[[int], int] = lambda signum: signum,
        launched: bool = False,
    ) -> None:
        """``agree``: a collective that returns one signal number (0 for none) from those that the ranks received.
        ``launched``: signals come through torchrun, perhaps twice, so a second one does not stop the run at once;
        torchrun itself kills a rank that takes too long."""
        self._received: int | None = None
        self._notice = notice
        self._doing = doing
        self._agree = agree
        self._launched = launched
        self._previous: dict[int, Any] = {}

    def pending(self) -> bool:
        """Whether a rank was asked to stop. A collective: all ranks call it at the same point."""
        signum = self._agree(self._received or 0)
        if signum:  # otherwise keep a signal that arrived during the collective, for the next call
            self._received = signum
        return bool(signum)

    def stop(self, message: str) -> NoReturn:
        """End the run with the exit code of the signal received."""
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
