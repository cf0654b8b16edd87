"""Trackio: a database on this machine, shown by `trackio show`, or a Hugging Face Space."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trackio

from marble_rl.config import dump_config
from marble_rl.config.trackers import TrackioTracker
from marble_rl.runs.media import gif_of
from marble_rl.runs.trackers.base import GRID, VIDEO, TrackedRun
from marble_rl.types import Metrics


class TrackioRun:
    """Trackio identifies runs by project and name; after --resume the newest run of that name is continued."""

    def __init__(self, settings: TrackioTracker, run: TrackedRun) -> None:
        name = settings.name or run.name
        self.identity = "/".join([settings.space_id or "local", settings.project, name])
        with redirect_stdout(sys.stderr):  # trackio prints to stdout, which is for the command's results
            self._run = trackio.init(
                project=settings.project,
                name=name,
                space_id=settings.space_id,
                config=json.loads(dump_config(run.config)),
                resume="allow" if run.identity == self.identity else "never",
            )
        self._kept = self._run._next_step  # private, no public name: the first step that it does not have yet

    def log(self, step: int, metrics: Metrics, grid: Path | None) -> None:
        # Steps that it has from before a crash are skipped: it would store them twice, and their values are the same.
        if step >= self._kept:
            with TemporaryDirectory() as folder:  # it copies files when they are logged
                pictures = {} if grid is None else {GRID: _shown(grid, f"step {step}", Path(folder))}
                logged: dict[str, Any] = {**metrics, **pictures}
                self._run.log(logged, step=step)

    def finish(self, exit_code: int) -> None:
        with redirect_stdout(sys.stderr):
            trackio.finish()


def _shown(grid: Path, caption: str, folder: Path) -> Any:
    if grid.suffix != VIDEO:
        return trackio.Image(str(grid), caption=caption)
    video = folder / f"{grid.stem}.gif"
    video.write_bytes(gif_of(grid))
    return trackio.Video(str(video), caption=caption)
