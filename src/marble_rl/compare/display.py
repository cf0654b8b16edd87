"""Progress of a comparison: a bar for all jobs and one for each that runs; plain lines where it is not a terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from marble_rl.compare.job_result import JobResult
from marble_rl.compare.jobs import Job

LINE_EVERY = 60.0
"""Seconds between lines on jobs under way."""
TRAINING_SHARE = 0.9
"""Of a job's bar; the rest is its evaluation."""


class JobsDisplay:
    def __init__(self, console: Console, total: int, done: int) -> None:
        self.console = console
        self._total, self._done = total, done
        self._parts: dict[str, float] = {}
        self._lines: dict[str, str] = {}
        self._began: dict[str, float] = {}
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._progress.add_task("[bold]all jobs", total=total, completed=done, detail=f"{done}/{total}")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> JobsDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def began(self, job: Job) -> None:
        self._began[job.name] = time.monotonic()
        self._tasks[job.name] = self._progress.add_task(job.name, total=1.0, detail="starting")
        self._line(f"started {job.name}")

    def progress(self, job: Job, stage: str, steps: int) -> None:
        total = job.config.trainer.steps
        training = stage == "train"
        part = TRAINING_SHARE * (min(steps / total, 1.0) if training else 1.0)
        detail = f"step {steps}/{total}" if training else "evaluating"
        self._parts[job.name], self._lines[job.name] = part, f"{job.name} {detail}"
        self._progress.update(self._tasks[job.name], completed=part, detail=detail)
        self._progress.update(self._all, completed=self._done + sum(self._parts.values()))
        if not self.console.is_terminal and time.monotonic() - self._last_line > LINE_EVERY:
            self._last_line = time.monotonic()
            self._line("under way: " + ", ".join(self._lines.values()))

    def ended(self, job: Job, result: JobResult | None) -> None:
        self._parts.pop(job.name, None)
        self._lines.pop(job.name, None)
        self._progress.remove_task(self._tasks.pop(job.name))
        self._done += result is not None
        self._progress.update(self._all, completed=self._done, detail=f"{self._done}/{self._total}")
        seconds = time.monotonic() - self._began[job.name]
        if result is None:
            self._line(f"stopped {job.name}", always=True)
        elif result.failed is not None:
            last = next((line for line in reversed(result.failed.last_lines) if line.strip()), "")
            failed = f"failed  {job.name} ({result.failed.stage}, exit code {result.failed.exit_code}): {last}"
            self._line(f"{failed}  [{job.log}]", always=True)
        else:
            self._line(f"done    {job.name} in {seconds:.0f} s ({self._done}/{self._total})")

    def _line(self, text: str, *, always: bool = False) -> None:
        if always or not self.console.is_terminal:
            self.console.print(text, markup=False, soft_wrap=True, highlight=False)
