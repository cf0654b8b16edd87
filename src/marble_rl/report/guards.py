"""The guards of a run, and what each of them saw (docs/metrics.md says what to do about it)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from marble_rl.config.schema import MarbleBalance
from marble_rl.report.reading import RunData
from marble_rl.report.wording import MINUS

OFTEN = 0.2
"""Share of the refreshes from which on a guard counts as trouble."""


@dataclass(frozen=True)
class Guard:
    """A guard and what it saw."""

    what: str
    seen: str
    quiet: bool


def guards(run: RunData) -> list[Guard]:
    """Every guard that the run logged."""
    found = []
    clamped = run.series("guard/clamped")
    if clamped:
        rollout = run.config.rollout
        all_advantages = len(clamped.values) * rollout.groups // rollout.updates * rollout.group_size * len(run.trained)
        count = round(math.fsum(clamped.values))
        share = count / max(1, all_advantages)
        found.append(Guard("advantages beyond the clamp", f"{count} of {all_advantages} ({share:.1%})", share < 0.03))
    found += _silent_rewards(run)
    for name, series in run.by_reward("guard/clipped").items():
        text = f"up to {max(series.values):.0%} of the scores"
        found.append(Guard(f"{name}: scores beyond its clip", text, max(series.values) < 0.8))
    for name, series in run.by_reward("guard/watch", run.held_out).items():
        count = sum(v > 0 for v in series.values)
        found.append(Guard(f"{name}: fell while trained rewards rose", f"{count} alarms", count == 0))
    stationary = run.series("qp/stationary").values
    if stationary:
        count = sum(v > 0 for v in stationary)
        text = f"{count} of {len(stationary)} refreshes"
        found.append(Guard("rewards that cancel each other", text, count <= OFTEN * len(stationary)))
    residual = run.series("qp/kkt_residual").values
    if residual:
        found.append(
            Guard(
                "error of the quadratic program",
                f"at most {max(residual):.0e}".replace("-", MINUS),
                max(residual) < 1e-9,
            )
        )
    balance = run.config.balance
    adam = isinstance(balance, MarbleBalance) and balance.metric == "adam"  # then the guarantee is one in that metric
    conflict = run.series("metric_harmony/conflict" if adam else "harmony/conflict").values
    if conflict and isinstance(balance, MarbleBalance) and balance.normalize:
        count = sum(v > 0 for v in conflict)
        text = f"{count} of {len(conflict)} refreshes"
        found.append(Guard("updates against a reward in their own batch", text, count == 0))
    for kind in ("failures", "retries"):
        for name, series in run.by_reward(f"scoring/{kind}", (*run.trained, *run.held_out)).items():
            count = round(math.fsum(series.values))
            if count:
                found.append(Guard(f"{name}: {kind} at scoring", str(count), False))
    return found


def _silent_rewards(run: RunData) -> list[Guard]:
    """Rewards whose gradient was zero in some batch; one line where there are none."""
    counts = {
        name: (sum(v > 0 for v in s.values), len(s.values)) for name, s in run.by_reward("guard/no_signal").items()
    }
    silent = [
        Guard(f"{name}: no gradient in a batch", f"{count} of {total} refreshes", count <= OFTEN * total)
        for name, (count, total) in counts.items()
        if count
    ]
    refreshes = max((total for _, total in counts.values()), default=0)
    none = [Guard("rewards without a gradient in a batch", f"0 of {refreshes} refreshes", True)] if refreshes else []
    return silent or none
