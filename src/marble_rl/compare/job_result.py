"""The record of a job, `jobs/NAME.json`: all that the table needs of it. Written last, so a job has one once it ended.

A job that crashed writes one too, with `failed` and without figures: a hole in the table.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from marble_rl.compare.jobs import JOBS, Job, config_hash, identity
from marble_rl.config.older import upgraded
from marble_rl.errors import InputError
from marble_rl.runs.history import package_versions
from marble_rl.runs.layout import wall_seconds
from marble_rl.runs.metrics_lines import read_lines
from marble_rl.runs.scores import ImageScores, Scores, WeightsScores
from marble_rl.storage import Record, storage_errors, write_bytes

_HARMONY = ("harmony/", "heldout/", "ws_harmony/", "ws_heldout/")
AVERAGED = ("alpha_bar/", "signal/", *_HARMONY, "qp/", "guard/no_signal/")
"""Figures of metrics.jsonl whose means over the lines that have them are kept."""
EVAL, EVALUATED, CPU = "eval/", "time/evaluate", "time/cpu"
AGAIN = "run the same command again"
"""What to do where a file of a comparison could not be written."""
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
class CurvePoint:
    """An evaluation during training (`trainer.eval_every`)."""

    step: int
    """Updates done"""
    seconds: float
    """Of training until then, evaluations left out: CPU time on a CPU, wall time elsewhere"""
    means: dict[str, float]
    """By reward, over the evaluated images"""


class JobResult(Record):
    """The content of a job's JSON."""

    kind: ClassVar[str] = "the result of a job"
    fix: ClassVar[str] = "Delete it to run the job again"

    @classmethod
    def upgraded(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Rules that had another name count as the same rule; those that are gone keep theirs."""
        if isinstance(tree.get("config"), dict):
            with suppress(InputError):
                return {**tree, "config": upgraded(tree["config"])}
        return tree

    method: Annotated[str, Field(max_length=500)]
    about: str
    seed: int
    overrides: list[str]
    config: dict[str, Any]
    """What the result depends on (jobs.identity)."""
    config_hash: str
    versions: dict[str, str]
    failed: Failure | None
    means: dict[str, float] = Field(default_factory=dict)
    """Over the evaluated images, by reward."""
    held_out: list[str] = Field(default_factory=list)
    """Evaluation-only rewards."""
    prompts: int = 0
    images_per_prompt: int = 0
    prompts_hash: str = ""
    per_prompt: dict[str, list[float | None]] = Field(default_factory=dict)
    """Mean over a prompt's images, by reward; null where it does not apply."""
    steps: int = 0
    images_per_step: float = 0
    """Images sampled, on average; with `rollout.epochs` fewer than a step trains on"""
    train_seconds: float = 0.0
    """In steps; loading models is not counted."""
    seconds_per_step: float = 0.0
    evaluate_seconds: float = 0.0
    training: dict[str, float] = Field(default_factory=dict)
    """Means of figures of metrics.jsonl."""
    curve: list[CurvePoint] = Field(default_factory=list)
    """Empty without evaluations of the same prompts during training (`--curve`)."""
    clock: Literal["CPU", "wall"] = "CPU"
    """Of the curve's seconds"""

    @model_validator(mode="after")
    def _whole(self) -> JobResult:
        """What a table takes for granted."""
        rewards, prompts = self.config.get("rewards", []), self.config.get("prompts", {})
        named = isinstance(rewards, list) and all(
            isinstance(r, dict) and isinstance(r.get("name"), str) for r in rewards
        )
        if not named or not isinstance(prompts, dict):
            raise ValueError("config: expected a list of rewards with names, and a mapping of prompts")
        if self.failed is not None:  # a hole: its figures are not looked at
            return self
        if self.means.keys() != self.per_prompt.keys():
            raise ValueError("expected the same rewards in `means` and in `per_prompt`")
        for name, scores in self.per_prompt.items():
            if len(scores) != self.prompts or all(score is None for score in scores):
                raise ValueError(f"per_prompt.{name}: expected a score or null of each of {self.prompts} prompts")
        return self

    @property
    def guards(self) -> list[str]:
        """Rewards that this job only kept above a floor."""
        return [reward["name"] for reward in self.config.get("rewards", ()) if reward.get("guard") is not None]

    @property
    def name(self) -> str:
        return f"{self.method} seed {self.seed}"

    def write(self, path: Path) -> None:
        """Whole or not at all; one key a line, so that a repository shows what changed."""
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.to_json().items())
        with storage_errors(str(path), AGAIN):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, f"{{\n{lines}\n}}\n".encode())


def job_result(job: Job, failed: Failure | None = None, **figures: Any) -> JobResult:
    """Of a job of this plan: what is known before it runs, and figures."""
    tree = identity(job.config)
    return JobResult(
        method=job.method.name,
        about=job.method.about,
        seed=job.seed,
        overrides=list(job.method.overrides),
        config=tree,
        config_hash=config_hash(tree),
        versions=package_versions(),
        failed=failed,
        **figures,
    )


def finished(job: Job, scores: Scores, evaluate_seconds: float) -> JobResult:
    """From the evaluation and the run's metrics.jsonl."""
    (weights,) = scores.weights.values()
    rollout = job.config.rollout
    lines = read_lines(job.run / "metrics.jsonl")
    trained = job.method.weights != "base"
    return job_result(
        job,
        means=weights.means,
        held_out=scores.held_out_rewards,
        **_per_prompt(weights),
        steps=job.config.trainer.steps if trained else 0,
        images_per_step=rollout.groups * rollout.group_size / rollout.steps_each if trained else 0,
        evaluate_seconds=round(evaluate_seconds, 3),
        **(_training(lines) if trained else {}),
        **(_curve(job, lines, weights.means) if trained else {}),
    )


def _curve(job: Job, lines: Sequence[Mapping[str, float]], final: Mapping[str, float]) -> dict[str, Any]:
    """Ends with the result's own evaluation, ``final``. CPU time on a CPU, if all lines have it: those of older
    versions do not."""
    if job.config.prompts.validation or not any(key.startswith(EVAL) for line in lines for key in line):
        return {}  # evaluated on other prompts than the result, or not at all
    cpu = job.on_cpu and all(CPU in line for line in lines)
    points, seconds = [], 0.0
    for line in lines:
        seconds += line[CPU] if cpu else _training_seconds(line)
        means = {key.removeprefix(EVAL): value for key, value in line.items() if key.startswith(EVAL)}
        last = int(line["step"]) + 1 == job.config.trainer.steps
        if means or last:
            points.append(CurvePoint(int(line["step"]) + 1, round(seconds, 3), dict(final) if last else means))
    return {"curve": points, "clock": "CPU" if cpu else "wall"}


def _per_prompt(weights: WeightsScores) -> dict[str, Any]:
    prompts: dict[tuple[str, int], list[ImageScores]] = {}
    for image in weights.images:
        prompts.setdefault((image.source, image.index), []).append(image)
    texts = [f"{source} {group[0].prompt}" for (source, _), group in prompts.items()]
    return {
        "prompts": len(prompts),
        "images_per_prompt": len(weights.images) // len(prompts),
        "prompts_hash": hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16],
        "per_prompt": {
            reward: [_mean([image.scores[reward] for image in group]) for group in prompts.values()]
            for reward in weights.means
        },
    }


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return float(f"{sum(known) / len(known):.{DIGITS}g}") if known else None


def _training_seconds(line: Mapping[str, float]) -> float:
    """Wall time of a step, evaluations left out."""
    return wall_seconds(line) - line.get(EVALUATED, 0.0)


def _training(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Seconds, and means of figures. Seconds come from the steps themselves: an interruption does not count."""
    seconds = sum(map(_training_seconds, lines))
    columns: dict[str, list[float]] = {}
    for key, value in ((key, value) for line in lines for key, value in line.items()):
        if key.startswith(AVERAGED):
            columns.setdefault(key, []).append(value)
    return {
        "train_seconds": round(seconds, 3),
        "seconds_per_step": round(seconds / max(len(lines), 1), 4),
        "training": {key: float(f"{sum(values) / len(values):.{DIGITS}g}") for key, values in columns.items()},
    }


def read_results(out: Path) -> dict[Path, JobResult]:
    """All results of a comparison, by file."""
    return {file: JobResult.read(file) for file in sorted((out / JOBS).glob("*.json"))}
