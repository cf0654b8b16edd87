"""One exception tree. Every error that a user can cause or meet carries the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class MarbleError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 1
    shared = False
    """Whether every rank of a distributed run raises it, so that rank 0 alone prints it."""
    hint = ""
    """What is saved and how to go on, printed below the message."""


class InputError(MarbleError, ValueError):
    """Bad input, reported before any model is loaded where possible. The message names the key, the value and the
    fix."""

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


class RankFailed(MarbleError):
    """Another rank of a distributed run raised an exception that is not a `MarbleError`."""


class Interrupted(MarbleError):
    """SIGINT, SIGTERM or SIGHUP, raised after loading or once the current step is finished and saved."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def require_name(name: str, names: Sequence[str], key: str) -> None:
    """Raise unless ``name`` is one of ``names``; the message proposes the nearest."""
    if name not in names:
        raise InputError(f"{key}: unknown name {name!r}.{suggestion(name, names)} Known: {', '.join(names)}")


def suggestion(name: str, names: Sequence[str]) -> str:
    """' Did you mean ...?' for the nearest of the valid names, or nothing."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def count_of(count: int, thing: str, things: str = "") -> str:
    """How messages count: `1 image`, `2 images`, `3 refreshes`, `1,152 images`."""
    return f"{count:,} {thing if count == 1 else things or f'{thing}s'}"
