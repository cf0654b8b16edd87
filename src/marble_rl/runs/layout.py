"""What a run's folder tells by the names of its files alone. Nothing here imports torch: `marble runs` is instant."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from marble_rl.errors import InputError
from marble_rl.storage import without_waiting

LOCK = ".lock"
"""File that is locked while a process trains in the folder; contains the host name of the process."""
JOB_IDENTITY = "identity.json"
"""In the folder of a job of a comparison, above its run"""
DAMAGED = "damaged-"
"""Stands before the name of a checkpoint that was found damaged."""
STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,14})")
MOST_HOST = 1000
"""Bytes of the name of a host"""
NOT_WALL_TIME = ("time/scoring", "time/waiting", "time/cpu")
"""What passes while a stage is timed."""


def in_use(folder: Path) -> bool | None:
    """Whether a process is training in this folder; None if unknown (a run of an older version, or another
    machine)."""
    try:
        with open(folder / LOCK, "rb", opener=without_waiting) as lock:
            if lock.read(MOST_HOST) != socket.gethostname().encode():
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def seems_alive(quiet: float, seconds_per_step: float) -> bool:
    """Where the lock tells nothing: whether a log that was not written for ``quiet`` seconds may go on. A pause that is
    long for its steps may be an evaluation, too."""
    return quiet < max(120.0, 10 * seconds_per_step)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps with a folder `step-N` or `.step-N.aside`, ascending; complete or not."""
    names = (re.sub(r"^\.(.*)\.aside$", r"\1", name) for name in _entries(folder))
    return sorted({step for name in names if (step := step_of(name)) is not None})


def damaged_checkpoints(folder: Path) -> list[str]:
    """Names of the checkpoints that a training found damaged and renamed (checkpoint.py)."""
    return sorted(name for name in _entries(folder) if name.startswith(DAMAGED))


def step_of(name: str) -> int | None:
    """N of the name `step-N`, as marble writes it; None for any other name."""
    match = STEP_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def _entries(folder: Path) -> list[str]:
    if not os.path.lexists(folder):
        return []
    try:
        return os.listdir(folder)
    except OSError as error:
        raise InputError(
            f"{folder} is not a folder of checkpoints that can be read ({error.strerror}); restore it, or move it away"
        ) from None


def evaluation_folder(run: Path) -> Path:
    """Where the scores of a run are; those of a comparison's job are beside its run."""
    is_job = run.resolve().name == "run" and (run.resolve().parent / JOB_IDENTITY).is_file()
    return (run.resolve().parent if is_job else run) / "evaluation"


def wall_seconds(line: Mapping[str, float]) -> float:
    """Of one step, from its line in metrics.jsonl."""
    return sum(
        value
        for key, value in line.items()
        if key.startswith("time/") and key.count("/") == 1 and key not in NOT_WALL_TIME
    )
