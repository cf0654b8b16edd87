"""One exception tree. Every error that a user can cause or meet carries the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class MarbleError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 1
    shared = False
    """Every process of a distributed run raises it, so that only the first has to tell."""


class InputError(MarbleError, ValueError):
    """Bad input, found before any model is loaded. Names the key, the value found and the fix."""

    exit_code = 2


class RunStopped(MarbleError, RuntimeError):
    """A run that stopped itself. What was learnt up to here is in the last checkpoint."""

    exit_code = 3


class RewardFailed(RunStopped):
    """A reward raised, timed out or returned something that is not a finite number. It is never scored 0."""


class RewardExploited(RunStopped):
    """A held-out reward fell while the trained ones rose, and the config says to stop then."""


class NonFinite(RunStopped):
    """A latent, loss or gradient was not finite. Nothing was updated from it."""


class NonFiniteGradient(NonFinite):
    """Found before any coefficient or weight was changed by it: the update can be left out."""


class OutOfMemory(RunStopped):
    """The device or the machine has no memory left. The message names the settings that help in that stage."""


class StorageFailed(RunStopped):
    """The disk refused a write. The last complete checkpoint is intact."""


class LostProcess(RunStopped):
    """Another process of a distributed run died, or did not answer in time."""


class ProcessFailed(MarbleError):
    """Another process of a distributed run met an error that this package does not know."""


class Interrupted(MarbleError):
    """SIGINT or SIGTERM, after the step under way was finished and saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def require_name(name: str, names: Sequence[str], key: str) -> None:
    """Raise unless ``name`` is one of ``names``, proposing the nearest."""
    if name not in names:
        raise InputError(f"{key}: unknown name {name!r}.{suggestion(name, names)} Known: {', '.join(names)}")


def suggestion(name: str, names: Sequence[str]) -> str:
    """' Did you mean ...?' for the nearest of the valid names, or nothing."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
