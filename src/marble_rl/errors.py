"""One exception tree. Every error that a user can cause or meet carries the exit code of the command line."""

from __future__ import annotations

import difflib
import re
import signal
import threading
from collections.abc import Sequence

MOST_OF_A_WORD, SHOWN_OF_A_WORD = 400, 200
MOST_OF_A_LINE = 2_000
MOST_LINES = 20
LONGEST_NAME = 100
"""Longer names are not compared with the valid ones, none of which is so long."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class MarbleError(Exception):
    """Base of all errors raised on purpose by this package. Its text is short, whatever values it names."""

    exit_code = 1
    shared = False
    """Whether every rank of a distributed run raises it, so that rank 0 alone prints it."""
    hint = ""
    """What is saved and how to go on, printed below the message."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(as_message(part) if isinstance(part, str) else part for part in arguments))


class InputError(MarbleError, ValueError):
    """Bad input, reported before any model is loaded where possible. The message names the key, the value and the
    fix."""

    exit_code = 2


class Untrusted(MarbleError):
    """Code that came with a run folder, which is not imported without `--trust`. No InputError: nothing is wrong with
    the input, so nothing that corrects or explains input may catch it."""

    exit_code = 2


class RunStopped(MarbleError, RuntimeError):
    """A run that stopped itself. If the disk allows it, a checkpoint of the last complete step was saved."""

    exit_code = 3


class RewardFailed(RunStopped):
    """A reward raised, timed out or returned something that is not a finite number. It is never scored 0."""


class RewardsAbandoned(RunStopped):
    """Rewards had not answered some seconds after the run was asked to stop."""


class RewardExploited(RunStopped):
    """An evaluation-only reward fell while the trained ones rose, and the config says to stop then."""


class PluginFailed(RunStopped):
    """A balancing rule or a loss given by import path raised."""


class NonFinite(RunStopped):
    """A latent, pixel, loss or gradient was not finite. Nothing was updated from it."""


class NonFiniteGradient(NonFinite):
    """A gradient was not finite. No coefficient or weight has changed yet, so the update can be skipped."""


class OutOfMemory(RunStopped):
    """Out of memory, on the device or on the host. The message names the settings that help in that stage."""


class StorageFailed(RunStopped):
    """The disk refused a write. The last complete checkpoint is intact."""


class RankLost(RunStopped):
    """Another rank of a distributed run died, or exceeded the timeout."""


class ExchangeFailed(RunStopped):
    """An exchange between ranks failed, and not because a rank died or was too slow: the network, NCCL, a driver."""


class RankFailed(MarbleError):
    """Another rank of a distributed run raised an exception that is not a `MarbleError`."""


class Interrupted(MarbleError):
    """SIGINT, SIGTERM or SIGHUP, raised after loading or once the current step is finished and saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class Stopped(KeyboardInterrupt):
    """A signal that stops at once, raised by a handler of ours: a reward may raise KeyboardInterrupt, but not this."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Escaped(Exception):
    """In place of what would have ended a thread or the program without a message, such as a SystemExit: its cause."""


def is_signal(error: BaseException) -> bool:
    """Whether a signal raised it. That happens in the main thread only. Where Python's own handler is in place, as in a
    script that imports this package, a KeyboardInterrupt that was raised by hand looks the same, and counts as one."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, Stopped) or signal.getsignal(signal.SIGINT) is signal.default_int_handler


def shortened(text: str, limit: int) -> str:
    """The beginning of a text from outside."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def text_of(error: BaseException) -> str:
    """The message of an exception that is not ours: it may be megabytes long, or raise when it is asked for."""
    try:
        return as_message(str(error))
    except BaseException as broken:
        if is_signal(broken):
            raise
        return f"its message cannot be shown: {type(broken).__name__}"


def described(error: BaseException) -> str:
    """An exception that is not ours, as a message shows it: `KeyError: 'target'`."""
    if isinstance(error, Escaped) and error.__cause__ is not None:
        error = error.__cause__
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def require_name(name: str, names: Sequence[str], key: str) -> None:
    """Raise unless ``name`` is one of ``names``; the message proposes the nearest."""
    if name not in names:
        raise InputError(f"{key}: unknown name {name!r}.{suggestion(name, names)} Known: {', '.join(names)}")


def suggestion(name: str, names: Sequence[str]) -> str:
    """' Did you mean ...?' for the nearest of the valid names, or nothing."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5) if len(name) <= LONGEST_NAME else []
    return f" Did you mean {near[0]!r}?" if near else ""


def count_of(count: int, thing: str, things: str = "") -> str:
    """How messages count: `1 image`, `2 images`, `3 refreshes`, `1,152 images`."""
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"


def as_message(text: str) -> str:
    """A message as it is shown: long words, lines and lists are cut, and control characters cannot reach a terminal.

    A message quotes keys and values of files that anyone may have written. The end of a line stays: it holds the fix.
    """
    text = _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
    text = re.sub(rf"\S{{{MOST_OF_A_WORD + 1},}}", lambda match: _cut_word(match[0]), text)
    lines = [_cut_line(line) for line in text.split("\n")]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = [f"  ... ({len(lines) - MOST_LINES + 1:,} more lines)"]
    return "\n".join(lines)


def _cut_word(word: str) -> str:
    return f"{word[:SHOWN_OF_A_WORD]}... ({len(word):,} characters)"


def _cut_line(line: str) -> str:
    if len(line) <= MOST_OF_A_LINE:
        return line
    half = MOST_OF_A_LINE // 2 - 50
    return f"{line[:half]} ... ({len(line):,} characters) ... {line[-half:]}"
