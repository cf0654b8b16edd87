"""Judge the registered plan (docs/results/plan.md) by the jobs that were run for it.

python -m tools.study.registered docs/results/rare              # part A
python -m tools.study.registered docs/results --part B
python -m tools.study.registered docs/results/many --part C
python -m tools.study.registered docs/results/closely --part E --specialists docs/results/rare

A1, C1, E1: the worst share of `fair` is above that of each other method. Paired by seed, Student's t over seeds
    (two-sided, as the 95 % intervals are), Holm's correction over the comparisons, level 0.05.
A2, C2, E2: its mean share is not below: the upper end of the 95 % interval of the difference is not below 0.
B1: its worst share is not much below: the lower end of the 95 % interval of the difference is above -0.15.

Only the registered seeds count, and nothing is judged before all of them are there: a look at half of the jobs decides
nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from marble_rl.compare.figures import Figures
from marble_rl.compare.job_result import JobResult, read_results
from marble_rl.compare.jobs import JOBS
from marble_rl.compare.methods import BASE, specialist
from marble_rl.compare.resume import check_comparable
from marble_rl.compare.shares import MEAN, WORST, Shares
from marble_rl.compare.table import results_by_method
from marble_rl.errors import InputError
from marble_rl.intervals import Interval
from marble_rl.report.wording import listed

LEVEL = 0.05
NOT_YET = "not measured yet"


@dataclass(frozen=True)
class Part:
    """What the plan says of one part."""

    name: str
    about: str
    method: str
    others: tuple[str, ...]
    """Those that `method` is compared with, with a verdict."""
    reported: tuple[str, ...]
    """Those that it is compared with without one."""
    seeds: tuple[int, ...]
    rewards: tuple[str, ...]
    """Trained on; each has a specialist."""
    specialists_seeds: tuple[int, ...]
    watched: tuple[str, ...]
    """Evaluation-only rewards, reported without a verdict."""
    margin: float | None = None
    """How far below the others the worst share may be; None: it must be above them."""
    denominators: Part | None = None
    """The part whose specialists and base model give the denominators, where this one has none of its own."""

    @property
    def jobs(self) -> list[tuple[str, int]]:
        """(method, seed) of every job; of the base model as many seeds as of the joint methods, for the gains."""
        joint = [(m, s) for m in (BASE, self.method, *self.others, *self.reported) for s in self.seeds]
        return joint if self.denominators else [*joint, *self.alone]

    @property
    def alone(self) -> list[tuple[str, int]]:
        return [(specialist(r), s) for r in self.rewards for s in self.specialists_seeds]


RARE = Part(
    name="A",
    about="rare specialists",
    method="fair",
    others=("weighted_sum", "gdpo", "uniform"),
    reported=("marble",),
    seeds=tuple(range(8)),
    rewards=("geneval", "ocr", "pickscore", "clipscore", "hpsv2"),
    specialists_seeds=tuple(range(4)),
    watched=("aesthetic", "tesseract"),
)
BALANCED = replace(
    RARE, name="B", about="balanced sources", seeds=tuple(range(5)), specialists_seeds=tuple(range(5)), margin=0.15
)
MANY = Part(
    name="C",
    about="many rewards, of which several nearly agree",
    method="fair",
    others=("weighted_sum", "gdpo", "unit_mean"),
    reported=(),
    seeds=tuple(range(5)),
    rewards=("geneval", "ocr", "tesseract", "pickscore", "clipscore", "hpsv2", "aesthetic", "colour"),
    specialists_seeds=(0, 1),
    watched=(),
)
CLOSELY = replace(
    RARE,
    name="E",
    about="rare specialists, measured more closely",
    reported=(),
    seeds=tuple(range(8, 18)),
    denominators=RARE,
)
PARTS = {part.name: part for part in (RARE, BALANCED, MANY, CLOSELY)}


@dataclass(frozen=True)
class Against:
    """`fair` against one other method."""

    other: str
    worst: Interval
    worst_noisy: Interval
    """The same with denominators that vary."""
    mean: Interval
    p: float
    """Of the worst share, two-sided, before any correction."""
    watched: dict[str, Interval]


@dataclass(frozen=True)
class Judged:
    """The verdicts on one part, and what they rest on."""

    part: Part
    missing: list[tuple[str, int]]
    """Jobs of the plan that have no result yet."""
    left_out: dict[str, str]
    """Rewards without a share, and why."""
    against: dict[str, Against]
    """Of the methods that are complete."""
    shares: dict[str, dict[str, Interval]] = field(default_factory=dict)
    """Of the same methods and of `part.method`, by reward, with the worst and the mean share."""

    @property
    def corrected(self) -> dict[str, float]:
        """Holm's p of each registered comparison; empty while one is missing, for they are corrected together."""
        if any(other not in self.against for other in self.part.others):
            return {}
        return holm({other: self.against[other].p for other in self.part.others})

    @property
    def sentences(self) -> list[str]:
        """The verdicts in words."""
        if self.part.margin is not None:
            return [f"{self.part.name}1 (worst share): {self._not_much_below(self.part.margin)}"]
        return [f"{self.part.name}1 (worst share): {self._worst()}", f"{self.part.name}2 (mean share): {self._mean()}"]

    @property
    def _not_judged(self) -> str:
        """Why there is no verdict; empty where there is one."""
        if all(other in self.against for other in self.part.others):
            return ""
        return f"{NOT_YET}." if self.missing else "not decided: no reward has a share."

    def _worst(self) -> str:
        if self._not_judged:
            return self._not_judged
        method, p = self.part.method, self.corrected
        above = [other for other in p if p[other] < LEVEL and self.against[other].worst.mean > 0]
        below = [other for other in p if p[other] < LEVEL and self.against[other].worst.mean < 0]
        unclear = [other for other in p if other not in above and other not in below]
        verdict = "confirmed" if len(above) == len(p) else "partly confirmed" if above else "not confirmed"
        parts = {"above that of": above, "below that of": below, "not clearly different from that of": unclear}
        said = ", ".join(f"{words} {listed(names)}" for words, names in parts.items() if names)
        return f"{verdict}. The worst share of {method} is {said} (Holm, level {LEVEL})."

    def _not_much_below(self, margin: float) -> str:
        if self._not_judged:
            return self._not_judged
        method, others = self.part.method, self.part.others
        open_ = [other for other in others if self.against[other].worst.low <= -margin]
        if open_:
            return (
                f"not confirmed. The worst share of {method} may be more than {margin} below that of {listed(open_)}."
            )
        return f"confirmed. The worst share of {method} is not more than {margin} below that of {listed(others)}."

    def _mean(self) -> str:
        if self._not_judged:
            return self._not_judged
        method, others = self.part.method, self.part.others
        below = [other for other in others if self.against[other].mean.high < 0]
        if below:
            return f"not confirmed. The mean share of {method} is below that of {listed(below)}."
        return f"confirmed. The mean share of {method} is not clearly below that of {listed(others)}."


def judge(results: Sequence[JobResult], part: Part = RARE, alone: Sequence[JobResult] = ()) -> Judged:
    """Of the part's jobs among the results; others, of other seeds or methods, do not count. ``alone``: the results of
    the part that has the denominators."""
    jobs = among(results, part.jobs)
    done = {(result.method, result.seed) for result in jobs}
    missing = [job for job in part.jobs if job not in done]
    incomplete = {method for method, _ in missing}
    if incomplete & {BASE, part.method, *map(specialist, part.rewards)}:
        return Judged(part, missing, {}, {})
    check_comparable(jobs)
    if part.denominators is not None:
        wanted = [*part.denominators.alone, *((BASE, seed) for seed in part.denominators.specialists_seeds)]
        borrowed = among(alone, wanted)
        if len(borrowed) < len(wanted):
            raise InputError(
                f"--specialists: {len(borrowed)} of {len(wanted)} jobs found; give the results of part "
                f"{part.denominators.name}"
            )
        check_comparable(borrowed)
        jobs = [*jobs, *borrowed]
    by_method, figures, shares = shares_of(jobs, part)
    others = [other for other in (*part.others, *part.reported) if other not in incomplete and shares.rewards]
    against = {other: _against(part, other, by_method, figures, shares) for other in others}
    of = {method: shares.of(by_method[method]) for method in (part.method, *against)}
    return Judged(part, missing, shares.left_out, against, of)


def shares_of(jobs: Sequence[JobResult], part: Part) -> tuple[Mapping[str, Sequence[JobResult]], Figures, Shares]:
    """The jobs by method, their scores, and the shares of the part's rewards."""
    by_method = results_by_method(jobs)
    figures = Figures(by_method, [name for name in jobs[0].means if all(name in job.means for job in jobs)])
    return by_method, figures, Shares(figures, by_method, part.rewards)


def among(results: Sequence[JobResult], planned: Sequence[tuple[str, int]]) -> list[JobResult]:
    return [result for result in results if result.failed is None and (result.method, result.seed) in planned]


def _against(
    part: Part, other: str, by_method: Mapping[str, Sequence[JobResult]], figures: Figures, shares: Shares
) -> Against:
    from scipy.stats import ttest_rel

    ours, theirs = by_method[part.method], by_method[other]
    of_ours, of_theirs = shares.by_seed(ours), shares.by_seed(theirs)
    differences = shares.differences(ours, theirs)
    scores = figures.differences(ours, theirs)
    return Against(
        other,
        differences[WORST],
        shares.differences(ours, theirs, noisy_denominators=True)[WORST],
        differences[MEAN],
        float(ttest_rel(*([of[seed][WORST] for seed in part.seeds] for of in (of_ours, of_theirs))).pvalue),
        {name: scores[name] for name in part.watched if name in scores},
    )


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Corrected p-values: the i-th smallest of m is multiplied by m - i, and none is below one before it."""
    corrected: dict[str, float] = {}
    highest = 0.0
    for i, name in enumerate(sorted(p, key=lambda name: p[name])):
        highest = max(highest, min(1.0, (len(p) - i) * p[name]))
        corrected[name] = highest
    return {name: corrected[name] for name in p}


def show(judged: Judged, console: Console) -> None:
    part = judged.part
    table = Table(
        title=f"Part {part.name}, {part.about}: {part.method} minus the other", box=SIMPLE_HEAD, title_justify="left"
    )
    heads = ("against", WORST, "denominators vary", "p", "p (Holm)", MEAN, *part.watched)
    for head in heads:
        table.add_column(head, justify="left" if head == "against" else "right", no_wrap=True)
    for other in (*part.others, *part.reported):
        of = judged.against.get(other)
        name = other if other in part.others else f"{other} (no verdict)"
        if of is None:
            table.add_row(name, NOT_YET, *[""] * (len(heads) - 2))
            continue
        corrected = f"{judged.corrected[other]:.4f}" if other in judged.corrected else ""
        shares = [_shown(of.worst), _shown(of.worst_noisy), f"{of.p:.4f}", corrected, _shown(of.mean)]
        table.add_row(name, *shares, *(_shown(of.watched[w]) if w in of.watched else "" for w in part.watched))
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)
    lines = [f"{reward} has no share and is left out: {reason}." for reward, reason in judged.left_out.items()]
    if judged.missing:
        methods = listed(list(dict.fromkeys(method for method, _ in judged.missing)))
        lines.append(f"{len(judged.missing)} of {len(part.jobs)} jobs are missing, of {methods}.")
    for line in (*lines, *judged.sentences):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shown(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the comparison, with its jobs/*.json")
    parser.add_argument("--part", choices=list(PARTS), default="A", help="of the plan (default: A)")
    parser.add_argument("--specialists", type=Path, metavar="DIR", help="of part E: the results of part A")
    given = parser.parse_args()
    folder: Path = given.folder
    if not (folder / JOBS).is_dir():
        print(f"{folder}: there is no {folder / JOBS}; give the --out of a comparison", file=sys.stderr)
        return 2
    try:
        alone = [] if given.specialists is None else list(read_results(given.specialists).values())
        judged = judge(list(read_results(folder).values()), PARTS[given.part], alone)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    show(judged, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
