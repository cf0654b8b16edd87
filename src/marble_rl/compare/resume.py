"""What is left to do in a folder that may hold parts of this comparison, or of another one."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from marble_rl.compare.jobs import JOBS, Job, changes, identity
from marble_rl.compare.results import JobResult, read_results
from marble_rl.config import load_config
from marble_rl.errors import InputError

PER_JOB = ("balance", "trainer.seed", "evaluation.seed")
"""Keys in which jobs of one comparison may differ, besides those that a method of the user's own sets."""


@contextmanager
def locked(out: Path) -> Iterator[int]:
    """Keep other processes out. Jobs inherit the descriptor: they keep the folder locked if this process is killed."""
    try:
        (out / JOBS).mkdir(parents=True, exist_ok=True)
        lock = open(out / JOBS / ".lock", "w")  # noqa: SIM115  held until the end
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror}; give another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"--out: a comparison is running in {out}, or jobs of one that was killed are saving; wait for it"
            ) from None
        yield lock.fileno()


def remaining_jobs(jobs: Sequence[Job], *, fresh: bool, notice: Callable[[str], None]) -> list[Job]:
    """Jobs without a finished result. What was made with another config is refused, or removed if ``fresh``."""
    out = jobs[0].out
    results = read_results(out)
    stale = _stale_plan(jobs, results) | _stale_others(jobs, results)
    if stale and not fresh:
        name, reason = next(iter(stale.items()))
        raise InputError(
            f"--out: {out} was made with another config. {name}: {reason}. "
            f"Restore that, give another --out, or throw {len(stale)} job(s) away with --fresh"
        )
    for name in stale:
        notice(f"throwing away {name}: {stale[name]}")
        for suffix in (".json", ".log"):
            (out / JOBS / f"{name}{suffix}").unlink(missing_ok=True)
        shutil.rmtree(out / JOBS / name, ignore_errors=True)
    done = {file.stem for file, result in results.items() if result.failed is None and file.stem not in stale}
    return [job for job in jobs if job.name not in done]


def _stale_plan(jobs: Sequence[Job], results: dict[Path, JobResult]) -> dict[str, str]:
    """{name: reason} of jobs of this plan that were begun or finished with another config."""
    stale = {}
    for job in jobs:
        before = results[job.result].config if job.result in results else _begun_with(job)
        found = [] if before is None else changes(before, identity(job.config))
        if found:
            stale[job.name] = "; ".join(found[:3])
    return stale


def _begun_with(job: Job) -> dict[str, object] | None:
    """The config of a job that has no result yet; None where it was not begun."""
    if not job.config_file.is_file():
        return None
    try:
        return identity(load_config(job.config_file))
    except InputError as error:
        return {f"{job.config_file} cannot be read: {error}": True}


def _stale_others(jobs: Sequence[Job], results: dict[Path, JobResult]) -> dict[str, str]:
    """{name: reason} of results that are not in this plan and would not be comparable with it."""
    planned = {job.result for job in jobs}
    now = identity(jobs[0].config)
    stale = {}
    for file, result in results.items():
        if file not in planned:
            own = [setting.partition("=")[0] for setting in (*jobs[0].method.overrides, *result.overrides)]
            found = changes(result.config, now, but=(*PER_JOB, *own))
            if found:
                stale[file.stem] = "; ".join(found[:3])
    return stale


def check_comparable(results: Sequence[JobResult]) -> None:
    """Results that are to stand in one table: one budget, one set of prompts."""
    first, *others = results
    for other in others:
        own = [setting.partition("=")[0] for setting in (*first.overrides, *other.overrides)]
        found = changes(first.config, other.config, but=(*PER_JOB, *own))
        if not found and (first.prompts_hash, first.images_per_prompt) != (other.prompts_hash, other.images_per_prompt):
            found = [f"held-out prompts were {first.prompts_hash}, now {other.prompts_hash}"]
        if found:
            raise InputError(
                f"{first.name} and {other.name} are not of one comparison: {'; '.join(found[:3])}. "
                "Move the results of one of them to another folder"
            )
