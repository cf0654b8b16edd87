"""Ctrl-C and SIGTERM: remember the signal, finish the step, save, then stop. A second Ctrl-C gives the step up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

from marble_rl.errors import Interrupted, Signalled

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_asked_at: float | None = None


def seconds_since_stop() -> float | None:
    """How long ago this process was asked to stop; None if it was not. Signals belong to the process, not to an
    object, so parts that wait need not be handed one."""
    return None if _asked_at is None else time.monotonic() - _asked_at


def _raise_signalled(signum: int, frame: FrameType | None) -> NoReturn:
    raise Signalled


@contextmanager
def told_apart() -> Iterator[None]:
    """While open, Ctrl-C raises Signalled, so that a KeyboardInterrupt out of a user's code is known to be its own."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _raise_signalled)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
        self.doing = doing
        """What is done before the program stops, for the notice."""
        self._agree = agree
        self._launched = launched
        self._shielded = False
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def pending(self) -> bool:
        """Whether a rank was asked to stop. A collective: all ranks call it at the same point."""
        signum = self._agree(self._received or 0)
        if signum:  # otherwise keep a signal that arrived during the collective, for the next call
            self._received = signum
        return bool(signum)

    def stop(self, message: str, hint: str = "") -> NoReturn:
        """End the run with the exit code of the signal received."""
        stop = Interrupted(self._received or signal.SIGINT, message)
        stop.shared = True
        stop.hint = hint
        raise stop

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Around changes that belong together: a second signal does not cut them in two, but waits for
        `raise_deferred`."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False

    def raise_deferred(self) -> None:
        """Raise KeyboardInterrupt if a second signal came while changes were shielded."""
        if self._deferred:
            raise Signalled

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _asked_at
        _asked_at = None
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        global _asked_at
        if self._received is not None:
            if self._launched:
                return
            if self._shielded:
                self._deferred = True
                return
            raise Signalled
        self._received = signum
        _asked_at = time.monotonic()
        name = signal.Signals(signum).name
        self._notice(f"{name}: {self.doing}." + ("" if self._launched else " Once more stops at once."))
