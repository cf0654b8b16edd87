"""From the results of jobs to the table: a row per method, differences against one of them, holes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from marble_rl.compare.figures import Figures
from marble_rl.compare.job_result import JobResult
from marble_rl.compare.methods import BASE, known_methods, specialist
from marble_rl.compare.resume import check_comparable
from marble_rl.compare.shares import MEAN, WORST, Shares
from marble_rl.compare.statistics import COMPOSITE, LEAST_METHODS
from marble_rl.compare.time_to_score import CurveMean, TimeToScore, learning_curve, times_to_score
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
    """By reward; the composite, if there are three methods; worst and mean share of a joint method, if there are
    shares (shares.py)."""
    z: dict[str, float]
    """By reward: z-score of the mean across the methods; empty where there is no composite."""
    differences: dict[str, Interval]
    """To the method compared with, on the seeds that both have; empty where there is none. A reward that scored no
    prompt of both methods is left out, and the composite with it."""
    steps: int
    images_per_step: float
    train_seconds: float
    """Mean over seeds, as are the following."""
    seconds_per_step: float
    training: dict[str, float]
    shares: dict[str, Interval] = field(default_factory=dict)
    """By reward that has one; of joint methods only."""
    curve: list[CurveMean] = field(default_factory=list)
    """Shares during training, if the jobs were evaluated then (time_to_score.py)"""
    to_score: list[TimeToScore] = field(default_factory=list)
    """How long until the shares are where those of the method compared with end"""

    def decided(self, column: str) -> bool:
        """Whether the difference in this column counts as one."""
        return decided(self.differences, column)


def decided(differences: Mapping[str, Interval], column: str) -> bool:
    """Whether the interval of a difference leaves out 0. The composite counts only where a reward's does, too: it is
    made of nothing else."""
    if column == COMPOSITE:
        rewards = (name for name in differences if name not in (COMPOSITE, WORST, MEAN))
        if not any(differences[name].significant for name in rewards):
            return False
    return column in differences and differences[column].significant


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

    version: int = 2
    """2: shares; no composite of two methods."""
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
    clock: Literal["CPU", "wall"] = "CPU"
    """Of the seconds of curves"""
    guards: list[str] = Field(default_factory=list)
    """Rewards that some method only keeps above a floor. They have no share: nobody asks them to rise."""
    no_share: dict[str, str] = Field(default_factory=dict)
    """Trained rewards that are left out of worst and mean share though their specialist was run, and why."""

    @model_validator(mode="after")
    def _whole(self) -> Comparison:
        if not self.rows or any(not row.figures.keys() >= set(self.rewards) for row in self.rows):
            raise ValueError("expected at least one method, and a figure of each for every reward")
        return self

    @property
    def columns(self) -> list[str]:
        """What is shown of each method: the shares first, by which joint methods are judged."""
        shares = [WORST, MEAN] if self.has_shares else []
        return [*shares, *self.rewards, *([COMPOSITE] if self.has_composite else [])]

    @property
    def trained(self) -> list[str]:
        return [name for name in self.rewards if name not in self.held_out]

    @property
    def objectives(self) -> list[str]:
        """Trained rewards that every method is asked to raise."""
        return [name for name in self.trained if name not in self.guards]

    @property
    def has_shares(self) -> bool:
        return any(WORST in row.figures for row in self.rows)

    @property
    def has_composite(self) -> bool:
        """Older files have one of two methods, too."""
        return len(self.rows) >= LEAST_METHODS and all(COMPOSITE in row.figures for row in self.rows)

    @property
    def joint(self) -> list[Row]:
        """Methods that train on several rewards."""
        alone = {BASE, *map(specialist, self.trained)}
        return [row for row in self.rows if row.method not in alone]

    @property
    def jobs_for_shares(self) -> list[tuple[str, int]]:
        """(method, seed) of the jobs that shares need beside those there are: the base model and each specialist with
        the seeds of the joint methods. Empty where both are there, and where there is nothing to share."""
        seeds = {row.method: set(row.seeds) for row in self.rows}
        needed = [BASE, *map(specialist, self.objectives)]
        if not self.joint or len(self.objectives) < 2 or all(method in seeds for method in needed):
            return []
        wanted = sorted({seed for row in self.joint for seed in row.seeds})
        return [(method, seed) for method in needed for seed in wanted if seed not in seeds.get(method, ())]

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
    by_method = results_by_method(good)
    crashed = {result.method for result in results} - set(by_method)
    against = None if against in crashed else _against(against, list(by_method))
    first = good[0]
    rewards = [name for name in first.means if all(name in result.means for result in good)]
    if not rewards:
        raise InputError(
            "no reward has scores in all results, so there is no table; evaluate on prompts that one applies to"
        )
    everything = dict.fromkeys(name for result in good for name in result.means)
    held_out = [name for name in rewards if name in first.held_out]
    figures = Figures(by_method, rewards)
    guards = [name for name in rewards if any(name in result.guards for result in good)]
    shares = Shares(figures, by_method, [name for name in rewards if name not in (*held_out, *guards)])
    reference = None if against is None else by_method[against]
    return Comparison(
        rewards=rewards,
        held_out=held_out,
        guards=guards,
        left_out=[name for name in everything if name not in rewards],
        against=against,
        rows=[_row(group, figures, shares, reference) for group in by_method.values()],
        holes=[_hole(result) for result in results if result.failed is not None],
        prompts=first.prompts,
        prompts_are="held-out" if first.config.get("prompts", {}).get("heldout") else "training",
        images_per_prompt=first.images_per_prompt,
        clock=next((result.clock for result in good if result.curve), first.clock),
        versions=[dict(kind) for kind in dict.fromkeys(tuple(result.versions.items()) for result in good)],
        no_share=shares.left_out,
    )


def results_by_method(results: Sequence[JobResult]) -> dict[str, list[JobResult]]:
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


def _row(group: list[JobResult], figures: Figures, shares: Shares, reference: list[JobResult] | None) -> Row:
    first = group[0]
    of_gains = shares.of(group)
    differences: dict[str, Interval] = {}
    if reference is not None and reference[0].method != first.method:
        differences = figures.differences(group, reference) | shares.differences(group, reference)
    keys = dict.fromkeys(key for result in group for key in result.training)
    return Row(
        first.method,
        first.about,
        first.overrides,
        [result.seed for result in group],
        figures.of(group) | {name: of_gains[name] for name in (WORST, MEAN) if name in of_gains},
        figures.z(group),
        differences,
        first.steps,
        first.images_per_step,
        _mean([result.train_seconds for result in group]),
        _mean([result.seconds_per_step for result in group]),
        {key: _mean([r.training[key] for r in group if key in r.training]) for key in keys},
        {name: of_gains[name] for name in shares.rewards if name in of_gains},
        learning_curve(group, shares),
        [] if reference is None else times_to_score(group, reference, shares),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _hole(result: JobResult) -> Hole:
    assert result.failed is not None
    last = next((line for line in reversed(result.failed.last_lines) if line.strip()), "")
    return Hole(result.method, result.seed, result.failed.stage, result.failed.exit_code, last)
