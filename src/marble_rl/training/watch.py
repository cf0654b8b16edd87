"""Watching for reward hacking: an evaluation-only reward that falls while the trained ones rise.

The run is cut into windows of W rollouts. The newest window is compared with the earlier one in which the watched
reward stood highest, in standard errors: t = (m_new - m_old) / (s sqrt(2 / W)), where m is the mean over a window's
rollouts and s^2 the variance of rollouts within a window, averaged over all windows so far. An alarm is raised if
t < -4 for the watched reward and the mean of the trained rewards' t is above 0. Prompts differ from rollout to
rollout; that noise is part of s.

Why 4: the earlier window is the highest of several, so by chance alone the newest tends to lie below it.
tests/training/test_watch.py counts false alarms of a reward that does not change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from marble_rl.config import RunConfig

THRESHOLD = 4.0
CERTAIN = 1e9
"""Absolute value of t where the mean of a reward changed although its variance within windows is 0."""


@dataclass(frozen=True)
class Window:
    """For each reward, mean and variance over the W rollouts of a window."""

    means: dict[str, float]
    variances: dict[str, float]

    @classmethod
    def of(cls, rollouts: Sequence[Mapping[str, float]]) -> Window:
        names = [name for name in rollouts[0] if all(name in rollout for rollout in rollouts)]
        columns = {name: [rollout[name] for rollout in rollouts] for name in names}
        return cls(
            {name: statistics.fmean(column) for name, column in columns.items()},
            {name: statistics.variance(column) for name, column in columns.items()},
        )


class HackingWatch:
    """Watches one evaluation-only reward."""

    def __init__(self, name: str, trained: Sequence[str], window: int) -> None:
        self.name = name
        self._trained = trained
        self._window = window
        self._windows: list[Window] = []
        self._rollouts: list[dict[str, float]] = []

    def observe(self, means: Mapping[str, float]) -> str | None:
        """Take in the mean of each reward over one rollout. Returns the alarm's text if there is one."""
        self._rollouts.append({name: means[name] for name in (self.name, *self._trained) if name in means})
        if len(self._rollouts) < self._window:
            return None
        self._windows.append(Window.of(self._rollouts))
        self._rollouts = []
        return self._alarm()

    def _alarm(self) -> str | None:
        *earlier, newest = [window for window in self._windows if self.name in window.means] or [self._windows[-1]]
        if not earlier or newest is not self._windows[-1]:
            return None
        highest = max(earlier, key=lambda window: window.means[self.name])
        watched_t = self._t(highest, newest, self.name)
        shared = [name for name in self._trained if name in highest.means and name in newest.means]
        trained_t = [self._t(highest, newest, name) for name in shared]
        if watched_t >= -THRESHOLD or not trained_t or statistics.fmean(trained_t) <= 0:
            return None
        before, now = highest.means[self.name], newest.means[self.name]
        return (
            f"evaluation-only reward {self.name!r} fell from {before:.4g} to {now:.4g} "
            f"({-watched_t:.1f} standard errors) while the trained rewards rose on average: they may be exploited"
        )

    def _t(self, earlier: Window, newest: Window, name: str) -> float:
        """Change of a reward between two windows, in standard errors."""
        rise = newest.means[name] - earlier.means[name]
        variance = statistics.fmean(w.variances[name] for w in self._windows if name in w.variances)
        if variance == 0.0:
            return math.copysign(CERTAIN, rise) if rise else 0.0
        return rise / math.sqrt(variance * 2 / self._window)

    def state_dict(self) -> dict[str, Any]:
        return {"windows": [asdict(window) for window in self._windows], "rollouts": self._rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows = [Window(**window) for window in state["windows"]]
        self._rollouts = list(state["rollouts"])


class Watches:
    """All watched rewards of a run."""

    def __init__(self, config: RunConfig) -> None:
        watched, trained = config.watched_rewards, config.trained_rewards
        self._by_name = {name: HackingWatch(name, trained, watch.window) for name, watch in watched.items()}

    def observe(self, means: Mapping[str, float]) -> dict[str, str]:
        """Take in the mean of each reward over one rollout. Returns the texts of alarms by watched reward."""
        alarms = {name: watch.observe(means) for name, watch in self._by_name.items()}
        return {name: alarm for name, alarm in alarms.items() if alarm is not None}

    def figures(self, alarms: Mapping[str, str]) -> dict[str, float]:
        """For the log: 1 for each watched reward with an alarm, else 0."""
        return {f"guard/watch/{name}": float(name in alarms) for name in self._by_name}

    def state_dict(self) -> dict[str, Any]:
        return {name: watch.state_dict() for name, watch in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """State of rewards that are no longer watched is ignored; newly watched rewards start without state."""
        for name in self._by_name.keys() & state.keys():
            self._by_name[name].load_state_dict(state[name])
