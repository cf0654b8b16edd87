"""What a run's folder tells by the names of its files alone. Nothing here imports torch: `marble runs` is instant."""

from __future__ import annotations

import fcntl
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path

LOCK = ".lock"
"""File that is locked while a process trains in the folder; contains the host name of the process."""
JOB_IDENTITY = "identity.json"
"""In the folder of a job of a comparison, above its run"""
NOT_WALL_TIME = ("time/scoring", "time/waiting")
"""Stages that pass while another one is timed."""


def in_use(folder: Path) -> bool | None:
    """Whether a process is training in this folder; None if unknown (a run of an older version, or another
    machine)."""
    try:
        with open(folder / LOCK) as lock:
            if lock.read() != socket.gethostname():
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
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    matches = (re.fullmatch(r"step-(\d+)|\.step-(\d+)\.aside", name) for name in names)
    return sorted({int(match[1] or match[2]) for match in matches if match})


def best_checkpoint(folder: Path) -> tuple[int, float] | None:
    """Step and score of the best of the checkpoints in ``folder`` (training/best.py), from the state of the newest;
    None where none was chosen."""
    newest = max(checkpoint_steps(folder), default=None)
    try:
        best = json.loads((folder / f"step-{newest}" / "state.json").read_text(encoding="utf-8"))["best"]
        return int(best["step"]), float(best["score"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


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
