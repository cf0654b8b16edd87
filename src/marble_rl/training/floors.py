"""Where each guard stands against its floor, and the rate at which it may change.

    level <- 0.8 level + 0.2 R        R: mean of (score - base score of its prompt) in a rollout; the first R as it is
    rho    = clip((floor - level) / band, -1, 1/2)

Above the band the guard is free (-1), at its floor it may not fall (0), below it must recover. The rate follows the
measured level alone: no integral, so nothing winds up. By default the band is a quarter of the base model's std
within a prompt, pooled over the rollouts so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from marble_rl.balancing.guards import MATERIAL
from marble_rl.rewards.core.settings import GuardConfig
from marble_rl.training.base_images import Reading
from marble_rl.types import Metrics

DECAY = 0.8
LOWEST, HIGHEST = -1.0, 0.5
BAND = 0.25
"""Default band, in base stds within a prompt."""
TINY = 1e-12
"""Least band: the scores of a base model may not vary at all."""
PATIENCE = 5
"""Rollouts in a row without a direction that satisfies all floors, before a message says so."""


@dataclass(frozen=True)
class Level:
    """Where a guard stands."""

    value: float | None = None
    """Smoothed difference to the base model; None before the first score"""
    squares: float = 0.0
    freedom: int = 0

    def after(self, reading: Reading | None) -> Level:
        if reading is None:
            return self
        new = reading.difference
        value = new if self.value is None else DECAY * self.value + (1 - DECAY) * new
        return Level(value, self.squares + reading.squares, self.freedom + reading.freedom)

    def rate(self, guard: GuardConfig) -> float | None:
        """rho; None before the first score."""
        if self.value is None:
            return None
        own = BAND * math.sqrt(self.squares / self.freedom) if self.freedom else 0.0
        band = max(own if guard.band is None else guard.band, TINY)
        return min(max((guard.floor - self.value) / band, LOWEST), HIGHEST)


@dataclass(frozen=True)
class Levels:
    """Of all guards, after a rollout."""

    guards: Mapping[str, GuardConfig]
    by_guard: Mapping[str, Level]
    strained: int = 0
    """Rollouts in a row in which no direction satisfied all floors"""

    @property
    def rates(self) -> dict[str, float]:
        """rho by guard, for the balancing rule."""
        rates = {name: level.rate(self.guards[name]) for name, level in self.by_guard.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def figures(self) -> Metrics:
        metrics: Metrics = {}
        for name, level in self.by_guard.items():
            metrics[f"floor/{name}/limit"] = self.guards[name].floor
            if level.value is not None:
                metrics[f"floor/{name}/level"] = level.value
        return metrics | {f"floor/{name}/rate": rate for name, rate in self.rates.items()}


@dataclass
class Floors:
    """The levels that a run has reached."""

    guards: Mapping[str, GuardConfig]
    levels: Levels = field(init=False)

    def __post_init__(self) -> None:
        self.levels = Levels(self.guards, {name: Level() for name in self.guards})

    def after(self, readings: Mapping[str, Reading]) -> Levels:
        """The levels after a rollout; changes nothing."""
        levels = {name: level.after(readings.get(name)) for name, level in self.levels.by_guard.items()}
        return Levels(self.guards, levels, self.levels.strained)

    def commit(self, levels: Levels, figures: Metrics) -> str | None:
        """The last update of a rollout was applied: store its levels. ``figures``: metrics of that update. Returns a
        message where the floors have contradicted each other for some rollouts."""
        short = [name for name in self.guards if figures.get(f"floor/{name}/slack", 0.0) > MATERIAL]
        strained = levels.strained + 1 if short else 0
        self.levels = Levels(self.guards, levels.by_guard, strained)
        if strained == 0 or strained % PATIENCE:
            return None
        stands = "; ".join(
            f"{name} stands at {levels.by_guard[name].value:+.4g}, its floor is {self.guards[name].floor:+.4g}"
            for name in short
        )
        return (
            f"no direction satisfies all floors, for {strained} rollouts: {stands}. "
            "Lower a floor (rewards[].guard.floor), or remove a guard"
        )

    def state_dict(self) -> dict[str, Any]:
        """Small JSON values, for checkpoints."""
        levels = {name: asdict(level) for name, level in self.levels.by_guard.items()}
        return {"strained": self.levels.strained, "levels": levels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        levels = {name: Level(**state["levels"][name]) for name in self.guards}
        self.levels = Levels(self.guards, levels, state["strained"])
