"""Judge the settings that the registered plan tries (docs/results/plan.md): parts F, H and T.

python -m tools.study.trials F      # noise that a group shares
python -m tools.study.trials H      # lazy regularisation off-policy
python -m tools.study.trials T      # time to score

Worst and mean share, paired by config and seed, Student's t over the pairs. Denominators and the base model are those
of the same config's finished parts. Nothing is judged before all jobs are there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marble_rl.compare.job_result import JobResult, read_results
from marble_rl.compare.methods import BASE
from marble_rl.compare.resume import check_comparable
from marble_rl.compare.shares import MEAN, WORST, Shares
from marble_rl.compare.statistics import over_seeds
from marble_rl.compare.time_to_score import times_to_score
from marble_rl.errors import InputError
from marble_rl.intervals import Interval
from tools.study.registered import BALANCED, NOT_YET, RARE, Part, among, shares_of

KEPT = Path("docs/results")
FRACTION = 0.8
"""Of the reference's final mean share, for the time to score"""
FASTER = 2.0
"""How many times shorter that time has to be"""


@dataclass(frozen=True)
class Trial:
    """What the plan says of one part: ``method`` against ``other`` in one or two configs."""

    about: str
    method: str
    other: str
    seeds: tuple[int, ...]
    folders: dict[str, Part]
    """Folder of the method's results below `KEPT` -> the part that has the denominators of that config"""
    shared: bool
    """Whether the results of ``other`` are among those of that part"""
    mean_above: float | None = None
    """Lower end of the interval of the mean share's difference; None: not judged"""
    worst_above: float | None = None
    """The same of the worst share; None: its upper end is not below 0"""


TRIALS = {
    "F": Trial(
        "noise that the samples of a prompt share",
        "fair_group",
        "fair",
        (0, 1, 2, 3, 4),
        {"noise/rare": RARE, "noise/study": BALANCED},
        True,
        0.0,
    ),
    "H": Trial("lazy regularisation off-policy", "lazy", "every", (0, 1, 2, 3, 4), {"lazy": RARE}, False, -0.15, -0.3),
    "T": Trial("time to score", "ours", "plain", (0, 1, 2, 3, 4), {"time/rare": RARE, "time/study": BALANCED}, False),
}
TRIED = tuple(folder for trial in TRIALS.values() for folder in trial.folders)
FOLDERS = {RARE.name: "rare", BALANCED.name: "."}


@dataclass(frozen=True)
class Config:
    """The results of one config."""

    ours: list[JobResult]
    theirs: list[JobResult]
    shares: Shares

    def differences(self, name: str) -> list[float]:
        """Of the worst or the mean share, by seed."""
        ours, theirs = self.shares.by_seed(self.ours), self.shares.by_seed(self.theirs)
        return [ours[seed][name] - theirs[seed][name] for seed in ours]

    @property
    def faster(self) -> float | None:
        """How many times sooner ours has 0.8 of what theirs ends with: the medians over seeds. None where the reference
        itself does not get there on most seeds, 0 where ours does not."""
        medians = []
        for group in (self.theirs, self.ours):
            found = [t for t in times_to_score(group, self.theirs, self.shares) if t.fraction == FRACTION]
            medians.append(found[0].seconds if found else None)
        reference, ours = medians
        return None if reference is None else 0.0 if ours is None else reference / ours


def gathered(trial: Trial, kept: Path) -> dict[str, Config] | list[str]:
    """The results of every config, or what is missing."""
    configs, missing = {}, []
    for folder, part in trial.folders.items():
        own = list(read_results(kept / folder).values())
        finished = list(read_results(kept / FOLDERS[part.name]).values())
        wanted = [(trial.method, seed) for seed in trial.seeds]
        wanted_others = [(trial.other, seed) for seed in trial.seeds]
        denominators = [*part.alone, *((BASE, seed) for seed in {*trial.seeds, *part.specialists_seeds})]
        ours, theirs = among(own, wanted), among(finished if trial.shared else own, wanted_others)
        alone = among(finished, denominators)
        done = {(job.method, job.seed) for job in (*ours, *theirs, *alone)}
        missing += [
            f"{method} seed {s} in {folder}" for method, s in (*wanted, *wanted_others) if (method, s) not in done
        ]
        missing += [f"{method} seed {s} of part {part.name}" for method, s in denominators if (method, s) not in done]
        jobs = [*ours, *theirs, *alone]
        if jobs and not missing:
            check_comparable(jobs)
            *_, shares = shares_of(jobs, part)
            configs[folder] = Config(ours, theirs, shares)
    return missing or configs


def judged(name: str, kept: Path = KEPT) -> list[str]:
    """The verdicts of one part, a sentence each."""
    trial = TRIALS[name]
    configs = gathered(trial, kept)
    if isinstance(configs, list):
        return [f"{name}: {NOT_YET}; {len(configs)} jobs are missing, the first is {configs[0]}."]
    if name == "T":
        return [*_times(name, configs), *(_worst(f"{name}2 in {key}", trial, [of]) for key, of in configs.items())]
    return [_mean(f"{name}1", trial, list(configs.values())), _worst(f"{name}2", trial, list(configs.values()))]


def _times(name: str, configs: dict[str, Config]) -> list[str]:
    lines = []
    for folder, config in configs.items():
        faster = config.faster
        said = "not decided: the reference does not get there" if faster is None else f"{faster:.2f} times shorter"
        verdict = "" if faster is None else "confirmed. " if faster >= FASTER else "not confirmed. "
        lines.append(f"{name}1 in {folder}: {verdict}The time to {FRACTION} of the reference's mean share: {said}.")
    return lines


def _mean(label: str, trial: Trial, configs: Sequence[Config]) -> str:
    difference = _paired(configs, MEAN)
    assert trial.mean_above is not None
    verdict = "confirmed" if difference.low > trial.mean_above else "not confirmed"
    return f"{label}: {verdict}. Mean share: {_shown(difference)}, expected above {trial.mean_above:g}."


def _worst(label: str, trial: Trial, configs: Sequence[Config]) -> str:
    difference = _paired(configs, WORST)
    if trial.worst_above is None:
        verdict, wanted = difference.high >= 0, "not clearly below 0"
    else:
        verdict, wanted = difference.low > trial.worst_above, f"above {trial.worst_above:g}"
    said = "confirmed" if verdict else "not confirmed"
    return f"{label}: {said}. Worst share: {_shown(difference)}, expected {wanted}."


def _paired(configs: Sequence[Config], name: str) -> Interval:
    return over_seeds(np.array([difference for config in configs for difference in config.differences(name)]))


def _shown(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f}, {interval.n} pairs)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(TRIALS), help="of the plan")
    parser.add_argument("--results", type=Path, default=KEPT, metavar="DIR", help=f"default: {KEPT}")
    given = parser.parse_args()
    try:
        lines = judged(given.part, given.results)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
