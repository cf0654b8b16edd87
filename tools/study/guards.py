"""Part D of the registered plan (docs/results/plan.md): a guard against a reward that opposes the others.

scripts/study.sh has the commands of its jobs. With their folders:

python -m tools.study.guards measure runs/study/guards runs/study/unguarded      # levels on the training prompts
python -m tools.study.guards judge runs/study/guards runs/study/unguarded runs/study

A *level* of the guarded reward is its mean minus the base model's, from the same noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marble_rl.compare.job_result import JobResult, read_results
from marble_rl.compare.jobs import JOBS
from marble_rl.compare.methods import BASE, specialist
from marble_rl.compare.table import results_by_method
from marble_rl.config import load_config
from marble_rl.errors import InputError
from marble_rl.runs.scores import SCORES, Scores
from marble_rl.storage import Record, storage_errors
from tools.study.registered import BALANCED, NOT_YET

GUARDED = "plain"
FAIR = "fair"
"""The rule: with the reward as an objective among the guards' jobs, without it among the others."""
GUARDS, UNGUARDED = "guards", "unguarded"
"""Folders of both comparisons in docs/results."""
FLOORS = {"guard_01": -0.01, "guard_02": -0.02, "guard_03": -0.03}
BY_HAND = tuple(f"weights:1,1,1,1,1,{weight}" for weight in ("0.5", "1", "2", "4"))
SEEDS = {BASE: range(5), FAIR: range(5), **dict.fromkeys(FLOORS, range(4)), **dict.fromkeys(BY_HAND, range(3))}
UNGUARDED_SEEDS = range(4)
OTHERS = BALANCED.rewards
SLACK = 0.005
"""D1: how far below its floor the reward may end."""
NEAR = 0.01
"""D2: how far above it."""
KEPT = 0.9
"""D3: of the mean share that the frontier has."""
HEADS = ("method", "floor", "level, training prompts", "lowest seed", "level, held-out", "mean share", "kept")
LEVELS = "levels"
"""Folder beside `jobs`, with the levels on the training prompts."""


class Levels(Record):
    """The guarded reward on the training prompts, one image of each."""

    kind: ClassVar[str] = "a measured level"
    fix: ClassVar[str] = "Delete it and run `python -m tools.study.guards measure` again"

    prompts: int
    base: float
    ema: float

    @property
    def level(self) -> float:
        return self.ema - self.base


def measure(folder: Path) -> None:
    """Evaluate the runs of a comparison on their training prompts, where the reward is a guard or only evaluated; what
    was measured before is kept."""
    jobs = [config.parent.parent for config in sorted((folder / JOBS).glob("*/run/config.json")) if _asked(config)]
    if not jobs:
        raise InputError(
            f"{folder}: no run has {GUARDED} as a guard or evaluation-only; run the comparisons of scripts/study.sh"
        )
    for number, job in enumerate(jobs, 1):
        out = folder / LEVELS / f"{job.name}.json"
        if not out.exists():
            print(f"{job.name} ({number} of {len(jobs)})", flush=True)
            measured = _evaluate(job)
            with storage_errors(str(out)):
                out.parent.mkdir(exist_ok=True)
                measured.write(out)


def _asked(config: Path) -> bool:
    rewards = {reward.name: reward for reward in load_config(config).rewards}
    return rewards[GUARDED].guard is not None or rewards[GUARDED].held_out


def _evaluate(job: Path) -> Levels:
    train = load_config(job / "run" / "config.json").prompts.train
    sources = json.dumps([source.model_dump(mode="json", exclude_defaults=True, exclude={"share"}) for source in train])
    command = ["evaluate", str(job / "run"), "--set", f"prompts.heldout={sources}", "--images", "1"]
    out = job / "training_prompts"
    subprocess.run([sys.executable, "-m", "marble_rl.cli", *command, "--out", str(out)], check=True)
    scores = Scores.read(out / SCORES)
    base, ema = (scores.weights[name].means[GUARDED] for name in ("base", "ema"))
    return Levels(prompts=scores.prompts, base=base, ema=ema)


@dataclass(frozen=True)
class Point:
    """What one method keeps: means over its seeds, on the held-out prompts."""

    level: float
    share: float
    """Mean share of the other rewards."""


@dataclass(frozen=True)
class Guarded:
    missing: list[str]
    levels: dict[str, list[float]]
    """By method and seed, on the training prompts."""
    points: dict[str, Point]

    @property
    def frontier(self) -> list[Point]:
        return sorted((self.points[name] for name in BY_HAND), key=lambda point: point.level)

    def kept(self, method: str) -> float:
        """Mean share over the frontier's at the same level; beyond its ends, over that of the end."""
        levels, shares = zip(*((point.level, point.share) for point in self.frontier), strict=True)
        point = self.points[method]
        return point.share / float(np.interp(point.level, levels, shares))

    @property
    def sentences(self) -> list[str]:
        if self.missing:
            return [f"D{number}: {NOT_YET}." for number in (1, 2, 3)]
        return [f"D1 (not below its floor): {self._held()}", f"D2 (near it): {self._near()}", f"D3: {self._frontier()}"]

    def _held(self) -> str:
        below = {m: [x for x in self.levels[m] if x < floor - SLACK] for m, floor in FLOORS.items()}
        failed = [f"{len(xs)} of {len(self.levels[m])} seeds of {m}" for m, xs in below.items() if xs]
        if failed:
            return f"not confirmed. More than {SLACK} below the floor: {', '.join(failed)}."
        return f"confirmed. {GUARDED} ends at most {SLACK} below its floor, at every floor and seed."

    def _near(self) -> str:
        unguarded = float(np.mean(self.levels[UNGUARDED]))
        asked = {m: floor for m, floor in FLOORS.items() if unguarded < floor}
        if not asked:
            return f"not decided. Without the guard {GUARDED} ends at {unguarded:+.4f}, above every floor."
        far = [m for m, floor in asked.items() if np.mean(self.levels[m]) > floor + NEAR]
        if far:
            return f"not confirmed. More than {NEAR} above the floor: {', '.join(far)}."
        return f"confirmed. It ends at most {NEAR} above its floor at {', '.join(asked)}."

    def _frontier(self) -> str:
        short = [m for m in FLOORS if self.kept(m) < KEPT]
        parts = ", ".join(f"{m} {self.kept(m):.2f}" for m in FLOORS)
        verdict = "not confirmed" if short else "confirmed"
        return f"{verdict}. Mean share of the others, relative to the frontier by hand: {parts} (asked: {KEPT})."


def judge(guards: Path, unguarded: Path, specialists: Path) -> Guarded:
    """Nothing is judged before all jobs and levels are there."""
    of_guards, without, alone = (_results(folder) for folder in (guards, unguarded, specialists))
    missing = [f"{m} seed {s}" for m, seeds in SEEDS.items() for s in seeds if s not in of_guards.get(m, {})]
    missing += [f"{UNGUARDED} seed {s}" for s in UNGUARDED_SEEDS if s not in without.get(FAIR, {})]
    files = {m: [guards / LEVELS / f"{m}-seed{s}.json" for s in SEEDS[m]] for m in FLOORS}
    files[UNGUARDED] = [unguarded / LEVELS / f"{FAIR}-seed{s}.json" for s in UNGUARDED_SEEDS]
    missing += [str(file) for of in files.values() for file in of if not file.exists()]
    if missing:
        return Guarded(missing, {}, {})
    levels = {method: [Levels.read(file).level for file in of] for method, of in files.items()}
    single = {reward: _gain(reward, alone[specialist(reward)], alone[BASE]) for reward in OTHERS}
    points = {m: _point(of_guards[m], of_guards[BASE], single) for m in SEEDS if m != BASE}
    points[UNGUARDED] = _point(without[FAIR], of_guards[BASE], single)
    return Guarded([], levels, points)


def _results(folder: Path) -> dict[str, dict[int, JobResult]]:
    done = [result for result in read_results(folder).values() if result.failed is None]
    by_method = results_by_method(done) if done else {}
    return {m: {result.seed: result for result in of} for m, of in by_method.items()}


def _gain(reward: str, trained: Mapping[int, JobResult], base: Mapping[int, JobResult]) -> float:
    """Mean over the seeds that both have."""
    return float(np.mean([trained[s].means[reward] - base[s].means[reward] for s in trained if s in base]))


def _point(trained: Mapping[int, JobResult], base: Mapping[int, JobResult], single: Mapping[str, float]) -> Point:
    shares = [_gain(reward, trained, base) / gain for reward, gain in single.items()]
    return Point(_gain(GUARDED, trained, base), float(np.mean(shares)))


def rows(judged: Guarded) -> list[list[str]]:
    """Of the table with the columns `HEADS`."""
    return [
        [
            method,
            f"{FLOORS[method]:+.2f}" if method in FLOORS else "",
            *(f"{figure(judged.levels[method]):+.4f}" if method in judged.levels else "" for figure in (np.mean, min)),
            f"{point.level:+.4f}",
            f"{point.share:.2f}",
            f"{judged.kept(method):.2f}" if method in FLOORS else "",
        ]
        for method, point in judged.points.items()
    ]


def show(judged: Guarded, console: Console) -> None:
    if judged.missing:
        console.print(f"{len(judged.missing)} results are missing, the first is {judged.missing[0]}.", soft_wrap=True)
    else:
        table = Table(title=f"Part D: {GUARDED} against the other five", box=SIMPLE_HEAD, title_justify="left")
        for head in HEADS:
            table.add_column(head, justify="left" if head == "method" else "right")
        for row in rows(judged):
            table.add_row(*row)
        console.print(table)
    for sentence in judged.sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure").add_argument("folders", type=Path, nargs="+", help="comparisons with their runs")
    judging = commands.add_parser("judge")
    for name, about in (
        ("guards", "comparison with guards and weights by hand"),
        ("unguarded", "comparison without the guarded reward"),
        ("specialists", "comparison with the runs on each reward alone"),
    ):
        judging.add_argument(name, type=Path, help=about)
    given = parser.parse_args(words)
    try:
        if given.command == "measure":
            for folder in given.folders:
                measure(folder)
        else:
            show(judge(given.guards, given.unguarded, given.specialists), Console())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
