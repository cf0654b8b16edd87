"""What a job leaves: one JSON file that needs nothing else. It is written last, so it is there or it is not.

A job that crashed leaves one too, with `failed` and without figures: a hole in the table.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from marble_rl import __version__
from marble_rl.compare.jobs import JOBS, Job, config_hash, identity
from marble_rl.errors import InputError
from marble_rl.storage import storage_errors, write_bytes

FORMAT = 1
NOT_WALL_TIME = ("time/scoring", "time/waiting")
"""Stages that pass while another one is timed."""
_HARMONY = ("harmony/", "heldout/", "ws_harmony/", "ws_heldout/", "metric_", "ws_metric_")
AVERAGED = ("alpha_bar/", "signal/", *_HARMONY, "qp/", "guard/no_signal/")
"""Figures of metrics.jsonl whose means over the lines that have them are kept."""
AGAIN = "run the same command again"
"""What helps where a file of a comparison could not be written."""
DIGITS = 6
"""Significant digits of scores per prompt: enough for intervals, and small files."""


@dataclass(frozen=True)
class Failure:
    """How a job crashed."""

    stage: str
    """train or evaluate"""
    exit_code: int
    last_lines: list[str]


@dataclass(frozen=True)
class JobResult:
    """The content of a job's JSON."""

    method: str
    about: str
    seed: int
    overrides: list[str]
    config: dict[str, Any]
    """What the result depends on (jobs.identity)."""
    config_hash: str
    versions: dict[str, str]
    failed: Failure | None = None
    means: dict[str, float] = field(default_factory=dict)
    """Over the held-out images, by reward."""
    held_out: list[str] = field(default_factory=list)
    """Rewards that were not trained on."""
    prompts: int = 0
    images_per_prompt: int = 0
    prompts_hash: str = ""
    per_prompt: dict[str, list[float | None]] = field(default_factory=dict)
    """Mean over a prompt's images, by reward; null where it does not apply."""
    steps: int = 0
    images_per_step: int = 0
    train_seconds: float = 0.0
    """In steps; loading models is not counted."""
    seconds_per_step: float = 0.0
    evaluate_seconds: float = 0.0
    training: dict[str, float] = field(default_factory=dict)
    """Means of figures of metrics.jsonl."""
    format: int = FORMAT

    @property
    def name(self) -> str:
        return f"{self.method} seed {self.seed}"


def job_result(job: Job, **figures: Any) -> JobResult:
    """Of a job of this plan: what is known before it runs, and figures."""
    tree = identity(job.config)
    return JobResult(
        job.method.name,
        job.method.about,
        job.seed,
        list(job.method.overrides),
        tree,
        config_hash(tree),
        versions(),
        **figures,
    )


def finished(job: Job, evaluation: dict[str, Any], evaluate_seconds: float) -> JobResult:
    """From the scores.json of `marble evaluate` and the run's metrics.jsonl."""
    (weights,) = evaluation["weights"].values()
    rollout = job.config.rollout
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = job.method.weights != "base"
    return job_result(
        job,
        means=weights["means"],
        held_out=evaluation["held_out_rewards"],
        **_per_prompt(weights["images"], list(weights["means"])),
        steps=job.config.trainer.steps if trained else 0,
        images_per_step=rollout.groups * rollout.group_size // rollout.updates if trained else 0,
        evaluate_seconds=round(evaluate_seconds, 3),
        **(_training(lines) if trained else {}),
    )


def _per_prompt(images: Sequence[dict[str, Any]], rewards: Sequence[str]) -> dict[str, Any]:
    prompts: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for image in images:
        prompts.setdefault((image["source"], image["index"]), []).append(image)
    texts = [f"{source} {group[0]['prompt']}" for (source, _), group in prompts.items()]
    return {
        "prompts": len(prompts),
        "images_per_prompt": len(images) // len(prompts),
        "prompts_hash": hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16],
        "per_prompt": {
            reward: [_mean([image["scores"][reward] for image in group]) for group in prompts.values()]
            for reward in rewards
        },
    }


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(f"{sum(known) / len(known):.{DIGITS}g}") if known else None


def _training(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Seconds, and means of figures. Seconds come from the steps themselves: an interruption does not count."""
    seconds = sum(value for line in lines for key, value in line.items() if _is_wall_time(key))
    keys = dict.fromkeys(key for line in lines for key in line if key.startswith(AVERAGED))
    columns = {key: [line[key] for line in lines if key in line] for key in keys}
    return {
        "train_seconds": round(seconds, 3),
        "seconds_per_step": round(seconds / len(lines), 4),
        "training": {key: float(f"{sum(values) / len(values):.{DIGITS}g}") for key, values in columns.items()},
    }


def _is_wall_time(key: str) -> bool:
    return key.startswith("time/") and key.count("/") == 1 and key not in NOT_WALL_TIME


def versions() -> dict[str, str]:
    found = {"marble": __version__, "python": platform.python_version()}
    for package in ("torch", "diffusers", "transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def write_result(file: Path, result: JobResult) -> None:
    """Whole or not at all; one key a line, so that a repository shows what changed."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in asdict(result).items())
    with storage_errors(str(file), AGAIN):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, f"{{\n{lines}\n}}\n".encode())


def read_result(file: Path) -> JobResult:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        failed = tree.pop("failed")
        result = JobResult(**tree, failed=None if failed is None else Failure(**failed))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{file} is not the result of a job: {error}. Delete it to run the job again") from None
    if result.format != FORMAT:
        raise InputError(f"{file} has format {result.format}, this version reads {FORMAT}; delete it to run it again")
    return result


def read_results(out: Path) -> dict[Path, JobResult]:
    """All results of a comparison, by file."""
    return {file: read_result(file) for file in sorted((out / JOBS).glob("*.json"))}
