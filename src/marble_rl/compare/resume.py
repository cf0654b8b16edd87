"""What is left to do in a folder that may hold parts of this comparison, or of another one."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from marble_rl.compare.job_result import AGAIN, JobResult, read_results
from marble_rl.compare.jobs import JOBS, Job, changes, identity
from marble_rl.errors import InputError, count_of
from marble_rl.runs.layout import JOB_IDENTITY
from marble_rl.storage import read_json, storage_errors, write_json

SEEDS = ("trainer.seed", "evaluation.seed")
"""Keys in which jobs of one method may differ."""
PER_METHOD = ("balance",)
"""Keys in which methods may differ, besides those that they set."""
JUDGING = ("evaluation", "prompts.heldout")
"""Keys that say how a training is judged, and do not touch it."""


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


def remaining_jobs(
    jobs: Sequence[Job], *, fresh: bool, evaluate_again: bool, notice: Callable[[str], None]
) -> list[Job]:
    """Jobs without a finished result. What was made with another config is refused, or removed if ``fresh``; where only
    the evaluation is another, ``evaluate_again`` removes no more than that."""
    out = jobs[0].out
    results = read_results(out)
    stale = _stale(jobs, results)
    another_training = _stale(jobs, results, but=JUDGING)
    badly_judged = [n for n in stale if n not in another_training and (out / JOBS / n / "run").exists()]
    planned = {job.name for job in jobs}
    unplanned = [n for n in badly_judged if n not in planned]
    if evaluate_again and unplanned and not fresh:
        raise InputError(
            f"--evaluate-again: {', '.join(unplanned[:5])}{' and others' if len(unplanned) > 5 else ''} in {out} would "
            "lose their scores and not get others; name their --methods and --seeds in the same call"
        )
    badly_judged = [n for n in badly_judged if n in planned]
    refused = {n: reason for n, reason in stale.items() if not (evaluate_again and n in badly_judged)}
    if refused and not fresh:
        name, reason = next(iter(refused.items()))
        keep = f", evaluate {len(badly_judged)} training(s) again with --evaluate-again" if badly_judged else ""
        raise InputError(
            f"--out: {out} was made with another config. {name}: {reason}. "
            f"Restore that, give another --out{keep}, or throw {count_of(len(refused), 'job')} away with --fresh"
        )
    for name, reason in refused.items():
        notice(f"throwing away {name}: {reason}")
        _throw_away(out / JOBS, name)
    for name in badly_judged if evaluate_again else ():
        notice(f"keeping the training of {name}: {stale[name]}")
        _forget_evaluation(out / JOBS, name, results.get(out / JOBS / f"{name}.json"))
    done = {file.stem for file, result in results.items() if result.failed is None and file.stem not in stale}
    return [job for job in jobs if job.name not in done]


def _stale(jobs: Sequence[Job], results: dict[Path, JobResult], but: Sequence[str] = ()) -> dict[str, str]:
    """{name: reason} of all that was made with another config, apart from keys under one of ``but``."""
    return _stale_plan(jobs, results, but) | _stale_others(jobs, results, but)


def _forget_evaluation(jobs: Path, name: str, result: JobResult | None) -> None:
    """The result itself is deleted last, after what its training was made with is saved."""
    with storage_errors(str(jobs / name), AGAIN):
        if (jobs / name / "evaluation").exists():
            shutil.rmtree(jobs / name / "evaluation")
        if result is not None:
            if (jobs / name).exists():
                write_json(jobs / name / JOB_IDENTITY, result.config)
            (jobs / f"{name}.json").unlink()


def _throw_away(jobs: Path, name: str) -> None:
    """The file that says with which config it was made is deleted last: if this is interrupted, the rest is still not
    taken for another job's."""
    with storage_errors(str(jobs / name), AGAIN):
        for suffix in (".json", ".log"):
            (jobs / f"{name}{suffix}").unlink(missing_ok=True)
        for folder in (jobs / name / "run", jobs / name / "evaluation", jobs / name):
            if folder.exists():
                shutil.rmtree(folder)


def _stale_plan(jobs: Sequence[Job], results: dict[Path, JobResult], but: Sequence[str]) -> dict[str, str]:
    """{name: reason} of jobs of this plan that were begun or finished with another config."""
    changed = {job.name: _changed(job, results.get(job.result), but) for job in jobs}
    return {name: "; ".join(reasons[:3]) for name, reasons in changed.items() if reasons}


def _changed(job: Job, result: JobResult | None, but: Sequence[str]) -> list[str]:
    """Since the job was finished, or begun."""
    if result is not None:
        return changes(result.config, identity(job.config), but)
    if not job.run.exists():
        return []
    try:
        return changes(read_json(job.identity_file), identity(job.config), but)
    except InputError:
        return [f"{job.identity_file}, which says what it was begun with, is missing or damaged"]


class _Made(NamedTuple):
    """What a result was made with, or a planned job will be."""

    method: str
    overrides: Sequence[str]
    config: dict[str, Any]


def _differences(one: _Made, other: _Made, but: Sequence[str] = ()) -> list[str]:
    """In what they are not comparable: everything counts that neither method sets, and within a method everything."""
    own: tuple[str, ...] = ()
    if one.method != other.method:
        own = (*PER_METHOD, *(setting.partition("=")[0] for setting in (*one.overrides, *other.overrides)))
    return changes(one.config, other.config, but=(*SEEDS, *own, *but))


def _stale_others(jobs: Sequence[Job], results: dict[Path, JobResult], but: Sequence[str]) -> dict[str, str]:
    """{name: reason} of results that are not in this plan and would not be comparable with it."""
    files = {job.result for job in jobs}
    # Every method, not only the first: a key that one sets is compared with the others.
    methods = {job.method.name: job for job in jobs}
    planned = [_Made(name, job.method.overrides, identity(job.config)) for name, job in methods.items()]
    stale = {}
    for file, result in results.items():
        if file not in files:
            reasons = dict.fromkeys(change for now in planned for change in _differences(_made(result), now, but))
            if reasons:
                stale[file.stem] = "; ".join(list(reasons)[:3])
    return stale


def check_comparable(results: Sequence[JobResult]) -> None:
    """Results that are to stand in one table: one budget, one set of prompts."""
    seen: dict[str, JobResult] = {}
    for result in results:
        for other in seen.values():
            reasons = _differences(_made(other), _made(result))
            asked, now = ((r.prompts_hash, r.images_per_prompt) for r in (other, result))
            if not reasons and asked != now:
                reasons = [f"held-out prompts were {asked[0]}, now {now[0]}"]
            if reasons:
                raise InputError(
                    f"{other.name} and {result.name} are not of one comparison: {'; '.join(reasons[:3])}. "
                    "Move the results of one of them to another folder"
                )
        seen.setdefault(result.method, result)


def _made(result: JobResult) -> _Made:
    return _Made(result.method, result.overrides, result.config)
