"""Trackers show a run while it goes on. Each is one file named like its `type`, its package and its extra.

They watch: no result depends on them, and one that fails is dropped with a warning while the run goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from marble_rl.config import RunConfig
from marble_rl.config.trackers import TrackerConfig
from marble_rl.errors import InputError, MarbleError
from marble_rl.runs.trackers.base import TrackedRun, Tracker
from marble_rl.storage import write_json
from marble_rl.types import Metrics

IDENTITIES = "trackers.json"
"""File in the run folder with what each tracker calls the run."""


def check_trackers(trackers: Sequence[TrackerConfig]) -> None:
    """Whether each is there once, and its package installed."""
    kinds = [tracker.type for tracker in trackers]
    for i, kind in enumerate(kinds):
        if kind in kinds[:i]:
            raise InputError(f"logging.trackers.{i}: {kind} is given twice; give each tracker once")
        found = importlib.util.find_spec(kind)
        if found is None or found.origin is None:  # a folder that a tracker made here is no package
            raise InputError(
                f"logging.trackers.{i}: {kind} needs the package {kind}, which is not installed; "
                f"pip install 'marble-rl[{kind}]'"
            )


class Trackers:
    """All trackers of a run, in its first process. Started on entry; on exit told how the run ended."""

    def __init__(
        self,
        trackers: Sequence[TrackerConfig],
        folder: Path,
        config: RunConfig,
        first_step: int,
        logged: int,
        say: Callable[[str], None],
    ) -> None:
        self._settings = trackers
        self._folder = folder
        self._config = config
        self._first_step = first_step
        self._logged = logged
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
        """The grid of a rollout. It waits for the figures of ``step``, the first that trains on the rollout.

        A step that never ends is taken again after --resume, grid and all; and a rollout that was begun before an
        interruption had its grid shown then. So nothing is shown twice, and nothing missed.
        """
        self._grid = (step, grid)

    def log(self, step: int, metrics: Metrics) -> None:
        grid = self._grid[1] if self._grid is not None and self._grid[0] == step else None
        self._grid = None
        self._each("log", lambda tracker: tracker.log(step, metrics, grid), step)

    def _start(self, settings: TrackerConfig) -> None:
        kind = settings.type
        file = self._folder / IDENTITIES
        identities: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        run = TrackedRun(self._folder, self._config, self._first_step, self._logged, identities.get(kind))
        module = importlib.import_module(f"{__name__}.{kind}")
        tracker: Tracker = module.start(settings, run)
        self._started[kind] = tracker
        if tracker.identity != run.identity:
            write_json(file, {**identities, kind: tracker.identity})

    def _each(self, action: str, call: Callable[[Tracker], None], step: int | None = None) -> None:
        for kind, tracker in list(self._started.items()):
            self._guarded(kind, action, partial(call, tracker), step)

    def _guarded(self, kind: str, action: str, call: Callable[[], None], step: int | None = None) -> None:
        """A network or disk that fails here must not cost the run: the tracker is left out from then on."""
        try:
            call()
        except Exception as error:
            self._started.pop(kind, None)
            when = "" if step is None else f" step {step}"
            self._say(
                f"warning: the tracker {kind} could not {action}{when} ({type(error).__name__}: {error}). "
                f"The run goes on without it; metrics.jsonl and samples/ in {self._folder} have everything"
            )
