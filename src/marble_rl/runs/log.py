"""The log of a run: metrics.jsonl for programs, a progress display for people."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from marble_rl.runs.metrics_lines import parsed, read_rows
from marble_rl.runs.run_log import LOG, STEPS
from marble_rl.storage import storage_errors, write_bytes
from marble_rl.types import Metrics

DROPPED = "metrics.dropped.jsonl"
"""Beside metrics.jsonl: lines that resumed runs removed from it, the last ones at the end"""
MOST_DROPPED = 1 << 24
"""Bytes of it; older lines are forgotten."""
EVALUATE = "evaluate"
"""The stage that `time/cpu` leaves out: it watches the training and is no part of it"""


class MetricsFile:
    """metrics.jsonl: one object per optimizer step."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Continue the file at ``first_step``: lines that a killed run logged after its checkpoint, and damaged ones,
        are moved to another file."""
        self._path = path
        rows = read_rows(path)
        steps = [None if (line := parsed(row)) is None else int(line["step"]) for row in rows]
        self.logged = max((step + 1 for step in steps if step is not None), default=0)
        """Number of steps in the file before lines were dropped."""
        kept: list[bytes] = []
        dropped: list[bytes] = []
        for row, step in zip(rows, steps, strict=True):
            (kept if step is not None and step < first_step else dropped).append(row + b"\n")
        self.dropped = len(dropped)
        """Number of lines that were moved"""
        with storage_errors(str(path)):
            if dropped:
                self._keep(dropped)
            if rows:
                write_bytes(path, b"".join(kept))

    def _keep(self, rows: Sequence[bytes]) -> None:
        """Append rows to the file of dropped ones, before they are removed from the other."""
        file = self._path.with_name(DROPPED)
        earlier = [row + b"\n" for row in read_rows(file)]
        size, last = 0, []
        for row in reversed([*earlier, *rows]):
            size += len(row)
            if size > MOST_DROPPED:
                break
            last.append(row)
        write_bytes(file, b"".join(reversed(last)))

    def append(self, step: int, metrics: Metrics) -> None:
        """Numbers that JSON does not have, NaN and infinity, are left out, with a warning: none is logged on
        purpose."""
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        if odd := sorted(metrics.keys() - finite.keys()):
            LOG.warning(f"warning: step {step + 1} has no finite {', '.join(odd)}; left out of {self._path.name}")
        line = json.dumps({"step": step, **dict(sorted(finite.items()))}, allow_nan=False)
        with storage_errors(str(self._path)), open(self._path, "a") as file:
            file.write(line + "\n")


class Display:
    """A progress bar with stage, rewards and time left; plain lines for the log, and where there is no terminal."""

    def __init__(self, console: Console, total: int, done: int, rewards: Sequence[str], print_every: int) -> None:
        self.console = console
        self._rewards = rewards
        self._print_every = print_every
        self._total = total
        self._began = time.perf_counter()
        self._began_at = done
        self._stage_seconds: Metrics = {}
        self._cpu_since = cpu_seconds()
        """Up to which CPU time `time/cpu` is logged"""
        self.current_stage = "loading"
        self.progress = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not console.is_terminal,
        )
        """Shown while this context is open."""
        self._task: TaskID = self.progress.add_task("starting", total=total, completed=done, detail="")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show one stage of the step, and count its time."""
        self.current_stage = name
        self.progress.update(self._task, description=name)
        start, cpu = time.perf_counter(), cpu_seconds()
        try:
            yield
        finally:
            self.add_time(name, time.perf_counter() - start)
            if name == EVALUATE:
                self._cpu_since += cpu_seconds() - cpu

    def add_time(self, name: str, seconds: float) -> None:
        """Add seconds that the caller measured."""
        key = f"time/{name}"
        self._stage_seconds[key] = self._stage_seconds.get(key, 0.0) + seconds

    def within(self, step: int, fraction: float) -> None:
        """Move the progress bar to a ``fraction`` (0 to 1) of a step."""
        self.progress.update(self._task, completed=step + 0.98 * fraction)

    def count(self, done: int, total: int) -> None:
        """Show how much of the current stage is done."""
        self.progress.update(self._task, description=f"{self.current_stage} {done}/{total}")

    def take_times(self) -> Metrics:
        """Seconds spent in each stage since the last call, and CPU time."""
        times, self._stage_seconds = self._stage_seconds, {}
        before, self._cpu_since = self._cpu_since, cpu_seconds()
        return {**times, "time/cpu": self._cpu_since - before}

    def step_done(self, done: int, metrics: Metrics) -> None:
        """Show that ``done`` steps are done, with the mean rewards of the last one."""
        figures = [f"{name} {metrics[f'reward/{name}']:.3f}" for name in self._rewards if f"reward/{name}" in metrics]
        self.progress.update(self._task, completed=done, detail=escape("  ".join(figures)))
        if done % self._print_every == 0 or done == self._total:
            pace = (time.perf_counter() - self._began) / (done - self._began_at)
            left = _duration(pace * (self._total - done))
            STEPS.info(f"step {done}/{self._total}  {'  '.join(figures)}  ({left} left)")


def cpu_seconds() -> float:
    """Of all threads of this process, and of the programs that it ran, such as tesseract."""
    return sum(os.times()[:4])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
