"""Ctrl-C, SIGTERM and SIGHUP (the terminal is closed, ssh is lost).

`Interrupts` is for work that is worth saving: remember the signal, finish the step, save, then stop. A second signal
gives the step up. `Stopping` is around a whole command, for the rest: imports, and commands with nothing to save.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

from marble_rl.errors import Interrupted, Stopped

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

STOPPED = "stopped"

_asked_at: float | None = None


def seconds_since_stop() -> float | None:
    """How long ago this process was asked to stop; None if it was not. Signals belong to the process, not to an
    object, so parts that wait need not be handed one."""
    return None if _asked_at is None else time.monotonic() - _asked_at


def _set_handlers(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set the handler of all signals that stop; returns the handlers before. Signals reach the main thread only. Under
    nohup SIGHUP is ignored, and stays so."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [s for s in SIGNALS if s == signal.SIGINT or signal.getsignal(s) is not signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in heard}


def _restore_handlers(previous: dict[int, Any]) -> None:
    for signum, handler in previous.items():
        signal.signal(signum, handler)


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
        """End the run with the exit code of the signal received; of two, the second."""
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
        """Raise `Stopped` if a second signal came while changes were shielded."""
        if self._deferred:
            raise Stopped(self._received or signal.SIGINT)

    def __enter__(self) -> Interrupts:
        self._previous = _set_handlers(self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _asked_at
        _asked_at = None
        _restore_handlers(self._previous)
        if Stopping.current is not None and Stopping.current.message:
            Stopping.current.message = STOPPED  # what it said before is about the time before this

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        global _asked_at
        if self._received is not None:
            if self._launched:
                return
            self._received = signum
            if self._shielded:
                self._deferred = True
                return
            raise Stopped(signum)
        self._received = signum
        _asked_at = time.monotonic()
        name = signal.Signals(signum).name
        self._notice(f"{name}: {self.doing}." + ("" if self._launched else " Once more stops at once."))


class Stopping:
    """Around a command: a signal ends it with one line and the exit code of the signal, never with a traceback.

    Where an exception would do harm, or is lost, the process ends on the spot: while a module is imported (C code that
    initialises itself prints the exception, or makes another one of it), in a destructor, where a library catches
    everything, in the command's last moments, and at a second signal. Files are safe then too: they survive kill -9.
    """

    current: Stopping | None = None

    def __init__(self, message: str = STOPPED) -> None:
        self.message = message
        """The line; empty for ranks that do not print."""
        self.received: int | None = None
        """The signal that raised `Stopped`."""
        self._ending = False
        self._watch: weakref.ref[Stopped] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        self._previous = _set_handlers(self._handle)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        Stopping.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        Stopping.current = self._watch = None
        sys.unraisablehook = self._hook
        if not self._ending:
            _restore_handlers(self._previous)

    def caught(self) -> None:
        """The exception has done its work."""
        self._watch = None

    def end(self) -> None:
        """The process is about to end: a signal from here on does not raise, also after the context is closed."""
        self._ending = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._ending or self.received is not None or _importing(frame):
            self._leave(signum)
        self.received = signum
        raise self._watched(signum)  # not held here: a traceback has the variables of its frames

    def _watched(self, signum: int) -> Stopped:
        """The exception. If it dies before this context is closed, somebody has caught it and goes on."""
        stop = Stopped(signum)
        self._watch = weakref.ref(stop, lambda _: self._leave(signum))
        return stop

    def _unraisable(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Stopped):
            self._leave(unraisable.exc_value.signum)
        self._hook(unraisable)

    def _leave(self, signum: int) -> NoReturn:
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar may have hidden it
        with suppress(OSError):
            os.write(2, (cursor + (f"{self.message}\n" if self.message else "")).encode())
        os._exit(128 + signum)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
