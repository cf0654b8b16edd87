"""Jobs and results of comparisons, for tests that train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marble_rl.compare.job_result import JobResult, job_result
from marble_rl.compare.jobs import Job, plan_jobs
from marble_rl.compare.table import Comparison, compare_results


def plan(
    config: Path,
    *overrides: str,
    methods: str = "weighted_sum,marble",
    seeds: tuple[int, ...] = (0, 1),
    curve: int | None = None,
) -> Any:
    return plan_jobs(config, overrides, [methods], seeds, config.parent / "out", curve)


def finish(job: Job, **figures: Any) -> JobResult:
    figures = {"means": {"a": 1.0, "b": 2.0}, "prompts": 1, "per_prompt": {"a": [1.0], "b": [2.0]}, **figures}
    result = job_result(job, **figures)
    result.write(job.result)
    return result


def result(method: str, seed: int, per_prompt: dict[str, list[float | None]], **more: Any) -> JobResult:
    known = {name: [v for v in column if v is not None] for name, column in per_prompt.items()}
    means = {name: sum(column) / len(column) for name, column in known.items()}
    count = len(next(iter(per_prompt.values()), []))
    figures = {"means": means, "prompts": count, "images_per_prompt": 1, "per_prompt": per_prompt, **more}
    return JobResult(
        method=method,
        about="about it",
        seed=seed,
        overrides=[],
        config_hash="hash",
        versions={"marble": "1"},
        **{"failed": None, "config": {"trainer": {"seed": seed}}, **figures},
    )


def table(scores: dict[str, list[dict[str, float]]], **options: Any) -> Comparison:
    """{method: [scores of seed 0, of seed 1, ...]}"""
    results = [
        result(method, seed, {name: [value] for name, value in row.items()})
        for method, rows in scores.items()
        for seed, row in enumerate(rows)
    ]
    return compare_results(results, **options)
