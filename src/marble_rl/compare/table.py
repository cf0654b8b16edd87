"""From the results of jobs to the table: a row per method, differences against one of them, holes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import model_validator

from marble_rl.compare.figures import Figures
from marble_rl.compare.job_result import JobResult
from marble_rl.compare.methods import known_methods
from marble_rl.compare.resume import check_comparable
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.errors import InputError, suggestion
from marble_rl.intervals import Interval
from marble_rl.storage import Record

COMPARISON = "compare.json"
AGAINST = "weighted_sum"
"""What methods are compared with unless another is named."""


@dataclass(frozen=True)
class Row:
    """One method."""

    method: str
    about: str
    overrides: list[str]
    seeds: list[int]
    figures: dict[str, Interval]
    """By reward, and the composite."""
    z: dict[str, float]
    """By reward: z-score of the mean across the methods."""
    differences: dict[str, Interval]
    """To the method compared with, on the seeds that both have; empty where there is none. A reward that scored no
    prompt of both methods is left out, and the composite with it."""
    steps: int
    images_per_step: int
    train_seconds: float
    """Mean over seeds, as are the following."""
    seconds_per_step: float
    training: dict[str, float]


@dataclass(frozen=True)
class Hole:
    """A job that crashed."""

    method: str
    seed: int
    stage: str
    exit_code: int
    last_line: str


class Comparison(Record):
    """The whole table, and the content of compare.json."""

    kind: ClassVar[str] = "a table"
    fix: ClassVar[str] = "Make it again with marble compare DIR --table-only"

    rewards: list[str]
    held_out: list[str]
    left_out: list[str]
    """Rewards that some results have no score of."""
    against: str | None
    rows: list[Row]
    holes: list[Hole]
    prompts: int
    prompts_are: Literal["held-out", "training"]
    images_per_prompt: int
    versions: list[dict[str, str]]
    """Each once; more than one if results were made with different ones."""

    @model_validator(mode="after")
    def _whole(self) -> Comparison:
        if not self.rows or any(not row.figures.keys() >= set(self.columns) for row in self.rows):
            raise ValueError("expected at least one method, and a figure of each for every reward")
        return self

    @property
    def columns(self) -> list[str]:
        return [*self.rewards, COMPOSITE]

    @property
    def crashed(self) -> dict[str, int]:
        """Jobs that crashed, by method."""
        return dict(Counter(hole.method for hole in self.holes))

    @property
    def wholly_crashed(self) -> list[str]:
        """Methods without any result."""
        return [method for method in self.crashed if all(row.method != method for row in self.rows)]


def compare_results(results: Sequence[JobResult], against: str | None = None) -> Comparison:
    """The table of all results. ``against`` None compares with the weighted sum, if it is there."""
    good = [result for result in results if result.failed is None]
    assert good, "a table needs at least one row"
    check_comparable(good)
    by_method = _by_method(good)
    crashed = {result.method for result in results} - set(by_method)
    against = None if against in crashed else _against(against, list(by_method))
    first = good[0]
    rewards = [name for name in first.means if all(name in result.means for result in good)]
    everything = dict.fromkeys(name for result in good for name in result.means)
    figures = Figures(by_method, rewards)
    return Comparison(
        rewards=rewards,
        held_out=[name for name in rewards if name in first.held_out],
        left_out=[name for name in everything if name not in rewards],
        against=against,
        rows=[_row(group, figures, None if against is None else by_method[against]) for group in by_method.values()],
        holes=[_hole(result) for result in results if result.failed is not None],
        prompts=first.prompts,
        prompts_are="held-out" if first.config.get("prompts", {}).get("heldout") else "training",
        images_per_prompt=first.images_per_prompt,
        versions=[dict(kind) for kind in dict.fromkeys(tuple(result.versions.items()) for result in good)],
    )


def _by_method(results: Sequence[JobResult]) -> dict[str, list[JobResult]]:
    """Seeds in order, methods in the order of the registry, the user's own ones last."""
    trained = [name for name in results[0].means if name not in results[0].held_out]
    known = {name: i for i, name in enumerate(known_methods(trained))}
    ordered = sorted(results, key=lambda result: (known.get(result.method, len(known)), result.method, result.seed))
    by_method: dict[str, list[JobResult]] = {}
    for result in ordered:
        by_method.setdefault(result.method, []).append(result)
    return by_method


def _against(name: str | None, methods: Sequence[str]) -> str | None:
    if name is None:
        return AGAINST if AGAINST in methods else None
    if name not in methods:
        raise InputError(
            f"--against: no results of {name!r}.{suggestion(name, methods)} There are: {', '.join(methods)}"
        )
    return name


def _row(group: list[JobResult], figures: Figures, reference: list[JobResult] | None) -> Row:
    first = group[0]
    compared = reference is not None and reference[0].method != first.method
    keys = dict.fromkeys(key for result in group for key in result.training)
    return Row(
        first.method,
        first.about,
        first.overrides,
        [result.seed for result in group],
        figures.of(group),
        figures.z(group),
        figures.differences(group, reference) if reference is not None and compared else {},
        first.steps,
        first.images_per_step,
        _mean([result.train_seconds for result in group]),
        _mean([result.seconds_per_step for result in group]),
        {key: _mean([r.training[key] for r in group if key in r.training]) for key in keys},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _hole(result: JobResult) -> Hole:
    assert result.failed is not None
    last = next((line for line in reversed(result.failed.last_lines) if line.strip()), "")
    return Hole(result.method, result.seed, result.failed.stage, result.failed.exit_code, last)
