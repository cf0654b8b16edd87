"""The interface of a tracker, and the description of a run that it gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from marble_rl.config import RunConfig
from marble_rl.types import Metrics

GRID = "samples"
"""Key of the image grids."""
VIDEO = ".webp"
"""Suffix of a grid that moves. No tracker shows that: they get `media.gif_of` it, at its own frame rate."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is started for."""

    folder: Path
    config: RunConfig
    first_step: int
    """The first step that will be logged: 0, or the step of the checkpoint that the run resumes from."""
    logged: int
    """Steps that the run logged before it was resumed; more than ``first_step`` if it crashed after its checkpoint."""
    identity: str | None = None
    """`Tracker.identity` from before the run was resumed; None if this tracker has not seen the run yet."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Tracker(Protocol):
    """A started tracker. If it raises, it is dropped, and the run continues."""

    identity: str
    """Id with which the tracker finds the run again after --resume."""

    def log(self, step: int, metrics: Metrics, grid: Path | None) -> None:
        """Metrics of a step; with the image grid of its rollout, if this is the rollout's first step and has a grid."""

    def finish(self, exit_code: int) -> None:
        """The run ended, with the exit code of its command."""
