"""Results of the study's jobs and diagnoses, in the form that claims are judged by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from marble_rl.compare.job_result import JobResult, read_results
from marble_rl.compare.jobs import JOBS
from marble_rl.compare.statistics import COMPOSITE, over_seeds
from marble_rl.compare.table import Comparison, Row, compare_results
from marble_rl.diagnose.record import DIAGNOSIS, Diagnosis
from marble_rl.errors import InputError
from marble_rl.intervals import Interval
from tools.study.guards import GUARDS, UNGUARDED, Guarded
from tools.study.guards import judge as judge_guards
from tools.study.trials import TRIALS
from tools.study.trials import judged as judge_trial

DIAGNOSES = "diagnoses"
LEAST_SEEDS = 2


class Study:
    """Results of jobs, and diagnoses of some runs, by name."""

    def __init__(self, results: Sequence[JobResult], diagnoses: Mapping[str, Diagnosis]) -> None:
        """``results``: of jobs that crashed, too."""
        self._all = results
        self.results = [result for result in results if result.failed is None]
        self.crashed = Counter(result.method for result in results if result.failed is not None)
        self.diagnoses = diagnoses
        self.table = compare_results(results)
        self._against: dict[str, Comparison] = {}

    def has(self, *methods: str) -> bool:
        """Whether all were run with the same seeds, two at least: a single seed says nothing of another training."""
        seeds = [{r.seed for r in self.results if r.method == method} for method in methods]
        return len(set.intersection(*seeds)) >= LEAST_SEEDS

    def row(self, method: str) -> Row:
        return next(row for row in self.table.rows if row.method == method)

    def difference(self, method: str, other: str) -> dict[str, Interval]:
        """``method`` minus ``other`` by reward and in the composite, paired by seed."""
        return next(row.differences for row in self.against(other).rows if row.method == method)

    def against(self, other: str) -> Comparison:
        """The table with differences to ``other``."""
        if other not in self._against:
            self._against[other] = compare_results(self._all, other)
        return self._against[other]

    def training(self, method: str, key: str) -> Interval | None:
        """Mean over seeds of a figure of metrics.jsonl, where two seeds or more have it."""
        values = [r.training[key] for r in self.results if r.method == method and key in r.training]
        return over_seeds(np.array(values)) if len(values) > 1 else None

    def ranking(self, methods: Sequence[str]) -> list[str]:
        """Those that were measured, the best composite first."""
        rows = [row for row in self.table.rows if row.method in methods]
        return [row.method for row in sorted(rows, key=lambda row: -row.figures[COMPOSITE].mean)]


@dataclass(frozen=True)
class Whole:
    """The study, and its parts with other configs as far as they were run; each in a folder of its name."""

    study: Study
    conflict: Study | None = None
    """configs/mini-conflict.yaml: with a reward that opposes the others"""
    large: Study | None = None
    """configs/mini-large.yaml: with larger batches"""
    rare: Study | None = None
    """configs/mini-rare.yaml: specialists in few prompts"""
    closely: Study | None = None
    """configs/mini-rare.yaml: part E of the plan, other seeds and more images; its denominators are those of `rare`"""
    many: Study | None = None
    """configs/mini-many.yaml: eight rewards"""
    guarded: Guarded | None = None
    """configs/mini-conflict.yaml: the opposing reward as a guard"""
    trials: dict[str, list[str]] = field(default_factory=dict)
    """Verdicts on the settings that were tried, by part of the plan"""

    @property
    def every(self) -> list[Study]:
        parts = (self.study, self.conflict, self.large, self.rare, self.closely, self.many)
        return [part for part in parts if part is not None]


PARTS = ("conflict", "large", "rare", "closely", "many")
"""Folders of the parts."""


def read_whole(folder: Path) -> Whole:
    guarded = judge_guards(folder / GUARDS, folder / UNGUARDED, folder) if (folder / GUARDS).exists() else None
    parts = {name: read_study(folder / name) for name in parts_in(folder)}
    trials = {name: judge_trial(name, folder) for name in TRIALS}
    return Whole(read_study(folder), guarded=guarded, trials=trials, **parts)


def parts_in(folder: Path) -> list[str]:
    """Those of which a job has ended."""
    return [name for name in PARTS if any((folder / name / JOBS).glob("*.json"))]


def read_study(folder: Path) -> Study:
    """FOLDER/jobs/*.json, and the diagnoses in FOLDER/diagnoses and in the jobs' run folders."""
    results = list(read_results(folder).values())
    if all(result.failed for result in results):
        raise InputError(f"{folder}: no scores of jobs in {folder / JOBS}; give the --out of a comparison")
    return Study(results, read_diagnoses(folder))


def read_diagnoses(folder: Path) -> dict[str, Diagnosis]:
    """Refused if one lacks what claims are judged by, so that a damaged file is named before it spoils a table."""
    diagnoses = {name: Diagnosis.read(file) for name, file in diagnoses_in(folder).items()}
    for name, diagnosis in diagnoses.items():
        directions = [diagnosis.directions.get(direction) for direction in ("marble", "weighted_sum")]
        if not all(direction and direction.in_batch and direction.independent for direction in directions):
            raise InputError(
                f"{folder}: the diagnosis {name} has no figures of marble or of weighted_sum; "
                "run `marble diagnose` on its run again, or delete it"
            )
    return diagnoses


def diagnoses_in(folder: Path) -> dict[str, Path]:
    """By name, which is the job's where its run was diagnosed."""
    kept = {file.stem: file for file in sorted((folder / DIAGNOSES).glob("*.json"))}
    runs = [*sorted((folder / DIAGNOSES).glob("*")), *sorted((folder / JOBS).glob("*/run"))]
    files = {run.parent.name if run.name == "run" else run.name: run / "diagnosis" / DIAGNOSIS for run in runs}
    return kept | {name: file for name, file in files.items() if file.exists()}
