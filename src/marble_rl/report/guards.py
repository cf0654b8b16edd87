"""The guards of a run, and what each of them saw (docs/metrics.md says what to do about it)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from marble_rl.balancing.registry import RULES
from marble_rl.errors import count_of
from marble_rl.report.run_data import RunData
from marble_rl.report.wording import MINUS

OFTEN = 0.2
"""Share of the refreshes, or steps, beyond which a guard counts as trouble."""
SELDOM = 0.02
"""Updates left out for each that was made: more are no accident."""


@dataclass(frozen=True)
class Guard:
    """A guard and what it saw."""

    what: str
    seen: str
    quiet: bool


def guards(run: RunData) -> list[Guard]:
    """Every guard that the run logged."""
    return [
        *_clamped(run),
        *_silent_rewards(run),
        *_rewards_out_of_bounds(run),
        *_quadratic_program(run),
        *_repeated_updates(run),
        *_scoring(run),
    ]


def _clamped(run: RunData) -> list[Guard]:
    clamped = run.series("guard/clamped")
    if not clamped:
        return []
    rollout = run.config.rollout
    all_advantages = len(clamped.values) * rollout.groups // rollout.updates * rollout.group_size * len(run.trained)
    count = round(math.fsum(clamped.values))
    share = count / max(1, all_advantages)
    return [Guard("advantages beyond the clamp", f"{count} of {all_advantages} ({share:.1%})", share < 0.03)]


def _rewards_out_of_bounds(run: RunData) -> list[Guard]:
    result = []
    for name, series in run.by_reward("guard/clipped").items():
        text = f"up to {max(series.values):.0%} of the scores"
        result.append(Guard(f"{name}: scores beyond its clip", text, max(series.values) < 0.8))
    for name, series in run.by_reward("guard/watch", run.held_out).items():
        count = sum(v > 0 for v in series.values)
        result.append(Guard(f"{name}: fell while trained rewards rose", count_of(count, "alarm"), count == 0))
    return result


def _quadratic_program(run: RunData) -> list[Guard]:
    balance = run.config.balance
    rule = RULES.part_of(balance)
    if not rule.uses_gradients():
        return []
    result = _times(run, "qp/stationary", "rewards that cancel each other", OFTEN)
    residual = run.series("qp/kkt_residual").values
    if residual and rule.solves:
        text = f"at most {max(residual):.0e}".replace("-", MINUS)
        result.append(Guard("error of the quadratic program", text, max(residual) < 1e-9))
    if rule.never_opposes(balance):
        result += _times(run, "harmony/conflict", "updates against a reward in their own batch", 0.0)
    return result


def _times(run: RunData, key: str, what: str, most: float) -> list[Guard]:
    """In how many refreshes the figure was above 0; quiet up to the share ``most`` of them."""
    values = run.series(key).values
    count = sum(v > 0 for v in values)
    text = f"{count} of {_refreshes(len(values))}"
    return [Guard(what, text, count <= most * len(values))] if values else []


def _repeated_updates(run: RunData) -> list[Guard]:
    """Updates that were left out or computed again because a number was not finite."""
    result = []
    skipped = run.series("guard/skipped").values
    if skipped:
        count = round(math.fsum(skipped))
        text = f"{count} beside {len(skipped)} that were made"
        result.append(Guard("updates left out: not finite", text, count <= SELDOM * len(skipped)))
    overflows = run.series("guard/overflows").values
    if overflows:
        count = sum(v > 0 for v in overflows)
        text = f"{count} of {count_of(len(overflows), 'step')}"
        result.append(Guard("gradients beyond float16", text, count <= OFTEN * len(overflows)))
    return result


def _scoring(run: RunData) -> list[Guard]:
    result = []
    for kind in ("failures", "retries"):
        for name, series in run.by_reward(f"scoring/{kind}", (*run.trained, *run.held_out)).items():
            count = round(math.fsum(series.values))
            if count:
                result.append(Guard(f"{name}: {kind} at scoring", str(count), False))
    return result


def _silent_rewards(run: RunData) -> list[Guard]:
    """Rewards whose gradient was zero in some batch; one line where there are none."""
    counts = {
        name: (sum(v > 0 for v in s.values), len(s.values)) for name, s in run.by_reward("guard/no_signal").items()
    }
    silent = [
        Guard(f"{name}: no gradient in a batch", f"{count} of {_refreshes(total)}", count <= OFTEN * total)
        for name, (count, total) in counts.items()
        if count
    ]
    refreshes = max((total for _, total in counts.values()), default=0)
    none = [Guard("rewards without a gradient in a batch", f"0 of {_refreshes(refreshes)}", True)] if refreshes else []
    return silent or none


def _refreshes(count: int) -> str:
    return count_of(count, "refresh", "refreshes")
