"""Weights & Biases: metrics and images on its server, or in the run folder until `wandb sync` uploads them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import wandb

from marble_rl.config import dump_config
from marble_rl.config.trackers import WandbTracker
from marble_rl.runs.media import gif_of
from marble_rl.runs.trackers.base import GRID, VIDEO, TrackedRun
from marble_rl.types import Metrics


class WandbRun:
    """One wandb run for one run folder, continued after --resume by its id."""

    def __init__(self, settings: WandbTracker, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or run.name,
            group=settings.group,
            tags=settings.tags,
            mode=settings.mode,
            config=json.loads(dump_config(run.config)),
            dir=str(run.folder),
            id=run.identity,
            resume=None if run.identity is None else "allow",
            settings=wandb.Settings(console="off"),  # otherwise it captures the progress bar
        )
        self.identity: str = self._run.id
        # Steps that wandb has from before a crash cannot be replaced; their values are the same, so they are skipped.
        # Online, the server knows how many there are. Offline, each start has a new file: count what was logged.
        offline_has = run.logged if self._run.offline and run.identity is not None else 0
        self._kept = max(self._run.starting_step, offline_has)

    def log(self, step: int, metrics: Metrics, grid: Path | None) -> None:
        if step >= self._kept:
            pictures = {} if grid is None else {GRID: _shown(grid, f"step {step}")}
            logged: dict[str, Any] = {**metrics, **pictures}
            self._run.log(logged, step=step, commit=True)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def _shown(grid: Path, caption: str) -> Any:
    if grid.suffix == VIDEO:
        return wandb.Video(io.BytesIO(gif_of(grid)), caption=caption, format="gif")
    return wandb.Image(str(grid), caption=caption)
