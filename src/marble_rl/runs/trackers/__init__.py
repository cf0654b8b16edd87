"""Trackers show a run while it trains. Each is one file with the name of its `type`, its package and its extra.

No result depends on them. A tracker that fails is dropped with a warning, and the run continues.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from marble_rl.config.trackers import TrackerConfig
from marble_rl.errors import InputError, MarbleError
from marble_rl.runs.trackers.base import TrackedRun, Tracker
from marble_rl.storage import write_json
from marble_rl.types import Metrics

IDENTITIES = "trackers.json"
"""File in the run folder with the id of the run in each tracker."""

CLASSES = {"tensorboard": "EventFiles", "wandb": "WandbRun", "trackio": "TrackioRun"}
"""The class in the file of each type."""


def check_trackers(trackers: Sequence[TrackerConfig]) -> None:
    """Refuse a tracker that is given twice, or whose package is not installed."""
    kinds = [tracker.type for tracker in trackers]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            raise InputError(f"logging.trackers.{i}: {kind} is given twice; give each tracker once")
        package = importlib.util.find_spec(kind)
        if package is None or package.origin is None:  # no origin: a folder of that name, which a tracker made here
            raise InputError(
                f"logging.trackers.{i}: {kind} needs the package {kind}, which is not installed; "
                f"pip install 'marble-rl[{kind}]'"
            )


class Trackers:
    """All trackers of a run, on rank 0. Entering starts them; leaving passes the exit code of the run to them."""

    def __init__(self, trackers: Sequence[TrackerConfig], run: TrackedRun, say: Callable[[str], None]) -> None:
        self._settings = trackers
        self._run = run
        self._say = say
        self._started: dict[str, Tracker] = {}
        self._grid: tuple[int, Path] | None = None

    def __enter__(self) -> Trackers:
        for settings in self._settings:
            self._guarded(settings.type, "start", partial(self._start, settings))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = 0 if value is None else value.exit_code if isinstance(value, MarbleError) else 1
        self._each("finish", lambda tracker: tracker.finish(code))

    def image(self, step: int, grid: Path) -> None:
        """Show the grid of a rollout with the metrics of ``step``, the first that trains on the rollout.

        So each grid is shown once: a step that was interrupted is made again after --resume, with its grid, and a
        rollout of which one step was logged before has shown its grid then.
        """
        self._grid = (step, grid)

    def log(self, step: int, metrics: Metrics) -> None:
        grid = self._grid[1] if self._grid is not None and self._grid[0] == step else None
        self._grid = None
        self._each("log", lambda tracker: tracker.log(step, metrics, grid), step)

    def _start(self, settings: TrackerConfig) -> None:
        kind = settings.type
        file = self._run.folder / IDENTITIES
        identities: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        run = replace(self._run, identity=identities.get(kind))
        module = importlib.import_module(f"{__name__}.{kind}")
        tracker: Tracker = getattr(module, CLASSES[kind])(settings, run)
        self._started[kind] = tracker
        if tracker.identity != run.identity:
            write_json(file, {**identities, kind: tracker.identity})

    def _each(self, action: str, call: Callable[[Tracker], None], step: int | None = None) -> None:
        for kind, tracker in list(self._started.items()):
            self._guarded(kind, action, partial(call, tracker), step)

    def _guarded(self, kind: str, action: str, call: Callable[[], None], step: int | None = None) -> None:
        """Call a tracker; if it raises, warn and drop it. A failing network or disk must not stop the run."""
        try:
            call()
        except Exception as error:
            self._started.pop(kind, None)
            when = "" if step is None else f" step {step}"
            self._say(
                f"warning: the tracker {kind} could not {action}{when} ({type(error).__name__}: {error}). "
                f"The run continues without it; metrics.jsonl and samples/ in {self._run.folder} have everything"
            )
