"""The content of a run folder. Parts that are missing or damaged become remarks on the page, never errors.

Only a folder without a readable config.json is refused, with the reason.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from marble_rl.config import RunConfig
from marble_rl.diagnose.record import DIAGNOSIS, Diagnosis
from marble_rl.errors import InputError, count_of
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.history import History
from marble_rl.runs.layout import step_of
from marble_rl.runs.manifest import complete_steps
from marble_rl.runs.metrics_lines import numbers, parsed, read_rows
from marble_rl.runs.scores import SCORES, Scores
from marble_rl.storage import RecordT
from marble_rl.types import Metrics


@dataclass(frozen=True)
class Series:
    """Values of one metric at the steps that logged it, counted from 1: metrics.jsonl counts from 0."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True)
class RunData:
    """A run as far as it has come."""

    folder: Path
    config: RunConfig
    lines: list[Metrics]
    """One an optimizer step, in order; every value is finite"""
    evaluation: Scores | None
    samples: list[tuple[int, Path]]
    """(step, counted from 1, PNG), in order"""
    modified: float | None
    """When the last line was logged, in seconds since the epoch"""
    remarks: list[str] = field(default_factory=list)
    """What could not be read"""
    diagnosis: Diagnosis | None = None
    checkpoint: int | None = None
    """Step of the newest one"""
    in_use: bool | None = None
    """Whether a process trains it; None where that is not known"""
    history: History | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        return self.config.trained_rewards

    @property
    def objectives(self) -> tuple[str, ...]:
        """Trained rewards that are to rise; the others are guards."""
        return self.config.objectives

    @property
    def held_out(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.config.rewards if reward.held_out)

    @property
    def steps_done(self) -> int:
        return int(self.lines[-1]["step"]) + 1 if self.lines else 0

    @property
    def finished(self) -> bool:
        return self.steps_done >= self.config.trainer.steps

    def series(self, key: str) -> Series:
        points = [(int(line["step"]) + 1, line[key]) for line in self.lines if key in line]
        return Series(tuple(step for step, _ in points), tuple(value for _, value in points))

    def by_reward(self, prefix: str, names: tuple[str, ...] | None = None) -> dict[str, Series]:
        """{name: series of prefix/name}, without the rewards that have none."""
        every = {name: self.series(f"{prefix}/{name}") for name in (self.trained if names is None else names)}
        return {name: series for name, series in every.items() if series}

    def total(self, key: str) -> float:
        return math.fsum(self.series(key).values)


def read_run(path: Path) -> RunData:
    """Read a run folder of this version, or of an older one whose config is still understood."""
    folder = RunFolder(path)
    config = folder.load_config()
    remarks: list[str] = []
    lines = read_metrics(folder.metrics, remarks)
    evaluation = read_if_whole(Scores, folder.evaluation / SCORES, remarks)
    diagnosis = read_if_whole(Diagnosis, folder.diagnosis / DIAGNOSIS, remarks)
    modified = folder.metrics.stat().st_mtime if folder.metrics.exists() else None
    samples = _samples(folder.samples)
    checkpoint = _newest_checkpoint(folder.checkpoints, remarks)
    history = read_if_whole(History, folder.history, remarks)
    return RunData(
        path, config, lines, evaluation, samples, modified, remarks, diagnosis, checkpoint, folder.in_use(), history
    )


def _newest_checkpoint(folder: Path, remarks: list[str]) -> int | None:
    try:
        return max(complete_steps(folder), default=None)
    except InputError as error:
        remarks.append(f"Left out: {error}.")
        return None


def read_if_whole(record: type[RecordT], file: Path, remarks: list[str]) -> RecordT | None:
    """None where there is no such file; None, with a remark, where it cannot be read."""
    if not file.exists():
        return None
    try:
        return record.read(file)
    except InputError as error:
        remarks.append(f"Left out: {str(error).replace(str(file), f'{file.parent.name}/{file.name}')}.")
        return None


def read_metrics(file: Path, remarks: list[str]) -> list[Metrics]:
    """Complete lines by step; a line that is cut short, or a value that is not a finite number, is left out."""
    if not os.path.lexists(file):
        remarks.append("There is no metrics.jsonl yet: nothing was logged.")
        return []
    by_step: dict[int, Metrics] = {}
    broken = dropped = 0
    try:
        rows = read_rows(file)
    except InputError as error:
        remarks.append(f"{file.name} could not be read: {str(error).removeprefix(f'cannot read {file}: ')}.")
        return []
    for row in rows:
        line = parsed(row)
        if line is None:
            broken += 1
            continue
        finite = numbers(line)
        dropped += len(line) - len(finite)
        by_step[int(line["step"])] = finite
    if broken:
        remarks.append(f"Left out, since not readable: {broken} of {count_of(len(rows), 'line')} of metrics.jsonl.")
    if dropped:
        remarks.append(f"Left out, since not finite numbers: {count_of(dropped, 'value')} in metrics.jsonl.")
    return [by_step[step] for step in sorted(by_step)]


def _samples(folder: Path) -> list[tuple[int, Path]]:
    steps = ((step_of(file.stem), file) for suffix in (".png", ".webp") for file in folder.glob(f"step-*{suffix}"))
    return sorted((step + 1, file) for step, file in steps if step is not None)
