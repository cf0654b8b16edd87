"""`marble runs`: the runs below a folder, each with its status, progress, latest scores and size. Imports no torch.

A run's files say how it ended, as far as anything can:

running    a process holds the folder's lock
finished   every step is logged and saved, and the LoRA is written
stopped    all that is logged is saved: Ctrl-C, SIGTERM, or a run that stopped itself. (A kill between two steps that
           were saved looks the same, and lost nothing.)
crashed    the log is ahead of the checkpoints: the process ended without saving (kill -9, power, a full disk)

Only the machine that trains can ask for the lock. Seen from another one, or of a version without locks, a run whose log
was written lately counts as running, and the status is marked as uncertain.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from marble_rl.errors import InputError
from marble_rl.runs.layout import (
    best_checkpoint,
    checkpoint_steps,
    evaluation_folder,
    in_use,
    seems_alive,
    wall_seconds,
)

Word = Literal["running", "finished", "stopped", "crashed"]
PARTS = ("checkpoints", "lora", "samples", "evaluation", "diagnosis")
"""Folders of a run, in which no other run is looked for."""


@dataclass(frozen=True)
class Latest:
    """Mean scores of one step."""

    step: int
    """Updates done"""
    means: dict[str, float]
    """By reward"""


@dataclass(frozen=True)
class RunOverview:
    """One run, from its files."""

    path: str
    status: Word
    certain: bool
    """Whether the status follows from the lock and the files. If not, from how long ago the log was written"""
    steps_done: int
    steps: int
    saved: int | None
    """Step of the newest checkpoint"""
    best: int | None
    """Step of the best checkpoint, if the run chooses one (docs/runs.md)"""
    written: float
    """When the last step was logged, in seconds since the epoch; before the first step, when the run was begun"""
    model: str
    rule: str
    seed: int
    training: Latest | None
    """Rewards of the last step's images"""
    evaluation: Latest | None
    """The newest evaluation: of `marble evaluate`, or during training"""
    size: int
    """Bytes on disk"""

    def to_json(self) -> dict[str, Any]:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.written))
        return {**asdict(self), "written": when}


@dataclass(frozen=True)
class Broken:
    """A folder that was a run, and cannot be read."""

    path: str
    reason: str


class _Unreadable(Exception):
    """The message says what is wrong."""


def find_runs(folder: Path) -> tuple[list[RunOverview], list[Broken]]:
    """All runs in and below a folder, the one written last first."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give one that runs were written to, such as runs")
    runs: list[RunOverview] = []
    broken: list[Broken] = []
    for entry in _folders(folder, broken):
        try:
            runs.append(_overview(entry))
        except (_Unreadable, OSError) as error:
            broken.append(Broken(str(entry), str(error)))
    return sorted(runs, key=lambda run: (-run.written, run.path)), sorted(broken, key=lambda entry: entry.path)


def _folders(root: Path, broken: list[Broken]) -> Iterator[Path]:
    """Every folder that is a run, or was one: its log or its checkpoints are there."""

    def unreadable(error: OSError) -> None:
        broken.append(Broken(str(error.filename), error.strerror or str(error)))

    for path, folders, files in os.walk(root, onerror=unreadable):
        has_state = "metrics.jsonl" in files or "checkpoints" in folders
        if has_state or {".lock", "config.json"} <= set(files):
            folders[:] = [name for name in folders if name not in PARTS]
            yield Path(path)


def _overview(folder: Path) -> RunOverview:
    config = _config(folder / "config.json")
    lines = _Lines(folder / "metrics.jsonl")
    steps_done = 0 if lines.last is None else int(lines.last["step"]) + 1
    saved = max(checkpoint_steps(folder / "checkpoints"), default=None)
    best = best_checkpoint(folder / "checkpoints")
    log = folder / "metrics.jsonl"
    written = (log if lines.last is not None else folder / "config.json").stat().st_mtime
    alive = in_use(folder)
    status = _status(folder, steps_done, config["steps"], saved)
    certain = alive is not None or status == "finished"
    if alive is None and status != "finished":
        pause = 0.0 if lines.last is None else wall_seconds(lines.last)
        alive = seems_alive(time.time() - written, pause)
    return RunOverview(
        path=str(folder),
        status="running" if alive else status,
        certain=certain,
        steps_done=steps_done,
        saved=saved,
        best=None if best is None else best[0],
        written=written,
        training=_latest(lines.last, "reward/"),
        evaluation=_evaluation(folder, lines),
        size=_size(folder),
        **config,
    )


def _status(folder: Path, done: int, wanted: int, saved: int | None) -> Word:
    """Of a run that no process trains."""
    if done >= wanted and (folder / "lora").is_dir() and (saved is None or saved >= wanted):
        return "finished"
    return "crashed" if done > (saved or 0) else "stopped"


def _config(file: Path) -> dict[str, Any]:
    """What the table shows of config.json. The schema, which would say more about a mistake in it, needs torch."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        return {
            "steps": int(tree["trainer"]["steps"]),
            "model": str(tree["model"]["path"]),
            "rule": str(tree["balance"]["type"]),
            "seed": int(tree["trainer"]["seed"]),
        }
    except FileNotFoundError:
        raise _Unreadable("it has no config.json") from None
    except KeyError as error:
        raise _Unreadable(f"its config.json has no {error}") from None
    except OSError as error:
        raise _Unreadable(f"its config.json cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _Unreadable(f"its config.json is damaged: {error}") from None


class _Lines:
    """The last lines of metrics.jsonl; one that was cut short by a crash does not count."""

    def __init__(self, file: Path) -> None:
        rows = file.read_bytes().splitlines() if file.exists() else []
        self.last = self._newest(rows, b"")
        self.last_evaluated = self._newest(rows, b'"eval/')

    def _newest(self, rows: list[bytes], part: bytes) -> dict[str, float] | None:
        for row in reversed(rows):
            if part in row and (line := _numbers(row)) is not None:
                return line
        return None


def _numbers(row: bytes) -> dict[str, float] | None:
    try:
        tree = json.loads(row)
        int(tree["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return {key: value for key, value in tree.items() if isinstance(value, int | float)}


def _latest(line: dict[str, float] | None, prefix: str) -> Latest | None:
    if line is None:
        return None
    means = {key.removeprefix(prefix): value for key, value in line.items() if key.startswith(prefix)}
    return Latest(int(line["step"]) + 1, means) if means else None


def _evaluation(folder: Path, lines: _Lines) -> Latest | None:
    """Of the later step; `marble evaluate` before one during training."""
    found = [_scores(evaluation_folder(folder) / "scores.json"), _latest(lines.last_evaluated, "eval/")]
    return max((latest for latest in found if latest is not None), key=lambda latest: latest.step, default=None)


def _scores(file: Path) -> Latest | None:
    """Of the last of the weights in an evaluation; None where there is none, or it cannot be read."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        weights = list(tree["weights"].values())[-1]
        return Latest(int(tree["step"]), {str(name): float(mean) for name, mean in weights["means"].items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _size(folder: Path) -> int:
    """Bytes of all files, links not followed; a file that is deleted meanwhile counts nothing."""
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total
