"""The command: plan, run what is left, write the table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from marble_rl.compare.display import JobsDisplay
from marble_rl.compare.job_result import read_results
from marble_rl.compare.jobs import JOBS, Job, plan_jobs
from marble_rl.compare.resume import locked, remaining_jobs
from marble_rl.compare.runner import run_jobs
from marble_rl.compare.table import Comparison, compare_results
from marble_rl.compare.writing import print_table, write_table
from marble_rl.config import RunConfig
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import InputError, MarbleError, count_of, suggestion


class JobsFailed(MarbleError):
    """Some jobs crashed; the table has holes."""


def run_comparison(
    config: Path,
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    against: str | None,
    at_once: int | None,
    fresh: bool,
    evaluate_again: bool,
    curve: int | None,
    console: Console,
) -> Comparison:
    """Run every job that has no result in ``out`` yet, then make the table of all results there."""
    from marble_rl.runs.inputs import check_inputs  # brings diffusers, which the table alone does not need

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True, highlight=False)

    def table_so_far() -> None:
        """For those who look while jobs run. What is wrong with it, or with --against, is reported at the end."""
        for other in (against, None):
            with suppress(MarbleError):
                make_table(out, against=other)
                return

    jobs = plan_jobs(config, overrides, methods, seeds, out, curve)
    _check_curves(jobs)
    remarks = (remark for different in _different_inputs(jobs) for remark in check_inputs(different).remarks)
    for remark in dict.fromkeys(remarks):
        say(remark)
    with locked(out) as lock:
        _check_against(against, jobs, out)
        left = remaining_jobs(jobs, fresh=fresh, evaluate_again=evaluate_again, notice=say)
        done = len(jobs) - len(left)
        if left:
            workers = min(at_once or _default_jobs(jobs[0]), len(left))
            say(f"{count_of(len(jobs), 'job')} in {out / JOBS}: {done} done, {len(left)} to run, {workers} at a time")
            with Interrupts(say, "stopping all jobs; they finish a step and save") as interrupts:
                with JobsDisplay(console, len(jobs), done) as display:
                    run_jobs(left, workers, display, interrupts, lock, on_result=table_so_far)
                if interrupts.pending():
                    interrupts.stop("stopped; the same command goes on from here")
        return make_table(out, against=against)


def make_table(out: Path, *, against: str | None) -> Comparison:
    """Read all results in ``out`` and write the table's files there."""
    results = read_results(out)
    if not results:
        raise InputError(f"{out}: no results of jobs in {out / JOBS}; give the --out of a comparison")
    if all(result.failed for result in results.values()):
        raise JobsFailed(f"every job crashed, so there is no table; what they printed is in {out / JOBS}/*.log")
    comparison = compare_results(list(results.values()), against)
    write_table(comparison, out)
    return comparison


def show(comparison: Comparison, out: Path, console: Console) -> None:
    print_table(comparison, console)
    files = ", ".join(str(out / name) for name in ("table.md", "compare.json", "compare.csv", "compare.png"))
    console.print(f"\nWrote {files}", markup=False, soft_wrap=True, highlight=False)


def raise_for_holes(comparison: Comparison, out: Path) -> None:
    """Exit code 1 if a job crashed."""
    if comparison.holes:
        names = ", ".join(f"{hole.method} seed {hole.seed}" for hole in comparison.holes)
        raise JobsFailed(
            f"{count_of(len(comparison.holes), 'job')} crashed: {names}. What they printed is in {out / JOBS}/*.log; "
            "the same command runs them again"
        )


def _different_inputs(jobs: Sequence[Job]) -> list[RunConfig]:
    """One config of all those that differ in balance and seeds alone."""
    alike = {}
    for job in jobs:
        shared = job.config.model_dump_json(exclude={"balance": True, "trainer": {"seed"}, "evaluation": {"seed"}})
        alike[shared] = job.config
    return list(alike.values())


def _check_curves(jobs: Sequence[Job]) -> None:
    for job in jobs:
        every, steps = job.config.trainer.eval_every, job.config.trainer.steps
        if every is not None and every >= steps:
            raise InputError(
                f"--curve: {every} is not below trainer.steps: {steps} of {job.method.name}; there would be no "
                "evaluation before the end"
            )
        if every is not None and job.config.prompts.validation:
            raise InputError(
                "--curve: with prompts.validation the evaluations during training score those prompts, not the ones of "
                "the table; leave one of the two out"
            )


def _check_against(against: str | None, jobs: Sequence[Job], out: Path) -> None:
    """Before hours of work."""
    known = list(dict.fromkeys([job.method.name for job in jobs] + [r.method for r in read_results(out).values()]))
    if against is not None and against not in known:
        raise InputError(
            f"--against: {against!r} is not compared.{suggestion(against, known)} There are: {', '.join(known)}"
        )


def _default_jobs(job: Job) -> int:
    """As many as there are cores, each with one thread; on an accelerator one."""
    if not job.on_cpu:
        return 1
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
