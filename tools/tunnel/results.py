"""Results of the tunnel's trainings, one JSON line each, and their shares.

    share_k = (gain of reward k) / (mean gain of the runs on reward k alone)
    worst share = min_k share_k,      mean share = mean_k share_k

Intervals are percentiles of a bootstrap over seeds that draws the runs of a rule and the runs on one reward alone,
since both are noisy. Differences between rules pair the seeds.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from marble_rl import balancing
from marble_rl.intervals import Interval
from tools.tunnel import rollouts, training, world
from tools.tunnel import rules as tried
from tools.tunnel.rules import section_of
from tools.tunnel.training import Outcome

Array = npt.NDArray[np.float64]
RESAMPLES = 4000
ALONE = "only-"
"""Prefix of a run on one reward alone"""


@dataclass(frozen=True)
class Job:
    regime: str
    rule: str
    seed: int

    @property
    def section(self) -> dict[str, object]:
        reward = self.rule.removeprefix(ALONE)
        return {"type": "single", "reward": reward} if reward != self.rule else section_of(self.rule)


def code() -> str:
    """Changes with the code that results depend on most: the tunnel's own, and all of balancing/."""
    files = [
        *Path(balancing.__path__[0]).glob("*.py"),
        *(Path(str(m.__file__)) for m in (world, rollouts, training, tried)),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:12]


class Results:
    """All finished trainings of a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trainings.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._done: dict[Job, dict[str, object]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the last line of an interrupted run
                continue
            self._done[Job(record["regime"], record["rule"], record["seed"])] = record
        self._code = code()

    def outcome(self, job: Job) -> Outcome | None:
        record = self._done.get(job)
        if record is None or record["code"] != self._code:
            return None
        return Outcome(record["gains"], record["length"], record["levels"])  # type: ignore[arg-type]

    def add(self, job: Job, outcome: Outcome) -> None:
        record = {**asdict(job), "code": self._code, **asdict(outcome)}
        self._done[job] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        return [job for job in jobs if self.outcome(job) is None]

    def gains(self, regime: str, rule: str, seeds: Sequence[int]) -> Array | None:
        """[S, K], or None if a seed is missing."""
        outcomes = [self.outcome(Job(regime, rule, seed)) for seed in seeds]
        names = [reward.name for reward in world.REGIMES[regime].rewards]
        if any(outcome is None for outcome in outcomes):
            return None
        return np.array([[o.gains[name] for name in names] for o in outcomes if o is not None])

    def length(self, regime: str, rule: str, seeds: Sequence[int]) -> float:
        outcomes = [self.outcome(Job(regime, rule, seed)) for seed in seeds]
        return float(np.mean([o.length for o in outcomes if o is not None]))


@dataclass(frozen=True)
class Row:
    """A rule in a regime."""

    rule: str
    worst: Interval
    mean: Interval
    shares: dict[str, float]
    length: float
    worst_over: dict[str, Interval]
    """Difference of worst shares to each other rule"""


def rows(results: Results, regime: str, rules: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """The rules of a regime that have all seeds; empty if a run on one reward alone is missing."""
    names = [reward.name for reward in world.REGIMES[regime].rewards]
    alone = [results.gains(regime, ALONE + name, seeds) for name in names]
    if any(gains is None for gains in alone):
        return []
    own = np.stack([gains[:, k] for k, gains in enumerate(alone) if gains is not None], axis=1)
    drawn = np.random.default_rng(0).integers(len(seeds), size=(2, RESAMPLES, len(seeds)))
    denominators = own[drawn[0]].mean(axis=1)
    resampled: dict[str, dict[str, Array]] = defaultdict(dict)
    table = []
    for rule in rules:
        gains = results.gains(regime, rule, seeds)
        if gains is None:
            continue
        shares = gains / own.mean(axis=0)
        per_draw = gains[drawn[1]] / denominators[:, None, :]
        resampled[rule] = {"worst": per_draw.min(axis=2).mean(axis=1), "mean": per_draw.mean(axis=(1, 2))}
        table.append((rule, shares))
    made = []
    for rule, shares in table:
        worst, mean = (
            interval(value, resampled[rule][name], len(seeds))
            for name, value in (("worst", shares.min(axis=1).mean()), ("mean", shares.mean()))
        )
        over = {
            other: interval(
                shares.min(axis=1).mean() - others.min(axis=1).mean(),
                resampled[rule]["worst"] - resampled[other]["worst"],
                len(seeds),
            )
            for other, others in table
            if other != rule
        }
        made.append(
            Row(
                rule,
                worst,
                mean,
                dict(zip(names, shares.mean(axis=0).tolist(), strict=True)),
                results.length(regime, rule, seeds),
                over,
            )
        )
    return made


def interval(value: float, draws: Array, seeds: int) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(mean=float(value), low=float(low), high=float(high), n=seeds)
