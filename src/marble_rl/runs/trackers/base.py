"""What a tracker is told of a run, and what it must be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from marble_rl.config import RunConfig
from marble_rl.types import Metrics

GRID = "samples"
"""Key of the image grids."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started for."""

    folder: Path
    config: RunConfig
    first_step: int
    """The first step that will be logged: 0, or where the checkpoint ends that the run goes on from."""
    logged: int
    """Steps that an earlier part of the run logged; more than ``first_step`` if it crashed after its checkpoint."""
    identity: str | None
    """What the tracker called this run (`Tracker.identity`) in an earlier part of it; None where it is new to it."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Tracker(Protocol):
    """A started tracker. Whatever it raises costs the run its tracker, and nothing else."""

    identity: str
    """What finds the run again after --resume."""

    def log(self, step: int, metrics: Metrics, grid: Path | None) -> None:
        """Figures of a step, with the image grid of the rollout that it begins, if one was drawn."""

    def finish(self, exit_code: int) -> None:
        """The run ended, with the exit code of its command."""
