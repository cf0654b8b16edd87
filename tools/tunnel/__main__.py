"""Compare balancing rules in the wind tunnel.

python -m tools.tunnel                                                 # the usual rules, all regimes, 20 seeds
python -m tools.tunnel --rules gdpo,fair,fair:momentum=0.98 --regimes rare,opposed --seeds 4
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from marble_rl.errors import InputError, count_of, require_name
from marble_rl.intervals import Interval
from tools.tunnel.results import ALONE, Job, Results, rows
from tools.tunnel.rules import section_of
from tools.tunnel.training import Outcome, Settings, run
from tools.tunnel.world import REGIMES

USUAL = "weighted_sum,gdpo,uniform,unit_mean,marble,fair"


def trained(job: Job) -> tuple[Job, Outcome]:
    return job, run(job.section, job.regime, job.seed)


def jobs_for(rules: list[str], regimes: list[str], seeds: list[int]) -> list[Job]:
    """Seed by seed, so that an interrupted run has complete seeds."""
    return [
        Job(regime, rule, seed)
        for seed in seeds
        for regime in regimes
        for rule in (*(ALONE + reward.name for reward in REGIMES[regime].rewards), *rules)
    ]


def show(
    results: Results, rules: list[str], regimes: list[str], seeds: list[int], against: str, console: Console
) -> None:
    for name in regimes:
        table = Table(title=f"{name}: {REGIMES[name].about} ({count_of(len(seeds), 'seed')})", title_justify="left")
        for column in ("rule", "worst share", f"minus that of {against}", "mean share", "shares", "length"):
            table.add_column(column)
        for row in rows(results, name, rules, seeds):
            table.add_row(
                row.rule,
                shown(row.worst),
                shown(row.worst_over[against]) if against in row.worst_over else "",
                shown(row.mean),
                " ".join(f"{reward} {share:.2f}" for reward, share in row.shares.items()),
                f"{row.length:.4f}",
            )
        console.print(table)


def markdown(results: Results, rules: list[str], regimes: list[str], seeds: list[int]) -> str:
    """One table: for each rule and regime the worst share with its interval, and the mean share."""
    cells: dict[str, dict[str, str]] = {rule: {} for rule in rules}
    for name in regimes:
        for row in rows(results, name, rules, seeds):
            worst = f"{row.worst.mean:.2f} ({row.worst.low:.2f} to {row.worst.high:.2f})"
            cells[row.rule][name] = f"{worst}, {row.mean.mean:.2f}"
    lines = [["rule", *(f"`{name}`" for name in regimes)], ["---"] * (1 + len(regimes))]
    lines += [[f"`{rule}`", *(of.get(name, "") for name in regimes)] for rule, of in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(interval: Interval) -> str:
    return f"{interval.mean:+.2f} ({interval.low:+.2f} to {interval.high:+.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default=USUAL, help="names with commas between them; settings after a colon")
    parser.add_argument("--regimes", default=",".join(REGIMES), help=f"of {', '.join(REGIMES)}")
    parser.add_argument("--seeds", type=int, default=20, help="trainings of each rule in each regime (default: 20)")
    parser.add_argument("--against", default="fair", help="rule whose worst share is subtracted (default: fair)")
    parser.add_argument("--first-seed", type=int, default=0, help="first of the seeds (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/tunnel"), help="folder of the results; resumes there")
    parser.add_argument("--markdown", action="store_true", help="one table of all regimes, for a page")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    given = parser.parse_args()
    rules, regimes = _names(given.rules), given.regimes.split(",")
    seeds = list(range(given.first_seed, given.first_seed + given.seeds))
    try:
        for rule in rules:
            Settings.of(section_of(rule))
        for regime in regimes:
            require_name(regime, list(REGIMES), "--regimes")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(width=200)
    results = Results(given.out)
    missing = results.missing(jobs_for(rules, regimes, seeds))
    with ProcessPoolExecutor(given.jobs) as pool:
        running = [pool.submit(trained, job) for job in missing]
        for future in track(as_completed(running), "training", total=len(running), console=Console(stderr=True)):
            results.add(*future.result())
    if given.markdown:
        print(markdown(results, rules, regimes, seeds))
    else:
        show(results, rules, regimes, seeds, given.against, console)
    return 0


def _names(text: str) -> list[str]:
    """Split at commas, except those between the settings of a rule."""
    names: list[str] = []
    for part in text.split(","):
        if "=" in part and ":" not in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


if __name__ == "__main__":
    sys.exit(main())
