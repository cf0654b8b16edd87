"""Everything that a run tells while it goes on, to each of its listeners: metrics.jsonl, samples/, trackers, people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console

from marble_rl.config import RunConfig
from marble_rl.config.trackers import TrackerConfig
from marble_rl.devices import peak_bytes
from marble_rl.distributed.world import World
from marble_rl.rewards.core.calls import Counts
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.images import image_grid, save_image
from marble_rl.runs.log import Display, MetricsFile
from marble_rl.runs.trackers import Trackers
from marble_rl.types import Metrics, Rollout

GRID_PROMPTS, GRID_IMAGES = 8, 8


def tracker_settings(config: RunConfig, world: World) -> list[TrackerConfig]:
    """One process tells what all of them do."""
    return config.logging.trackers if world.first else []


class Journal:
    """Kept by every process, since some of its figures are those of all; written by the first."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        world: World,
        scorer: Scorer,
        device: torch.device,
        console: Console,
        step: int,
    ) -> None:
        """``step``: updates done. What was told of later ones is forgotten: they come again."""
        self._config = config
        self._folder = folder
        self._world = world
        self._scorer = scorer
        self._device = device
        self._file = MetricsFile(folder.metrics, step) if world.first else None
        logged = 0 if self._file is None else self._file.logged
        say = partial(console.print, markup=False, soft_wrap=True)
        self._trackers = Trackers(tracker_settings(config, world), folder.path, config, step, logged, say)
        self.display = Display(console, config.trainer.steps, step, config.trained_rewards, config.logging.print_every)
        self._counts = scorer.counts()
        """What each reward had done when the last line was written."""
        self._waited = world.waited
        """Seconds that other processes had been waited for then."""
        self._open = ExitStack()

    def __enter__(self) -> Journal:
        self._open.enter_context(self._trackers)
        self._open.enter_context(self.display)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, value, trace)

    def log(self, step: int, metrics: Metrics) -> None:
        """Adds what the step took to what it found, and tells of both."""
        metrics |= self._scoring()
        metrics |= self._times()
        metrics["memory/peak_mb"] = self._world.largest(peak_bytes(self._device)) / 2**20
        self._trackers.log(step, metrics)  # first, so that they know of every step that the file tells of
        if self._file is not None:
            self._file.append(step, metrics)
        self.display.step_done(step + 1, metrics)

    def show(self, rollout: Rollout, step: int) -> None:
        """Some images of the rollout made before update ``step``, where one of its updates is to have a grid."""
        every, updates = self._config.logging.images_every, self._config.rollout.updates
        first = step - step % updates
        if every is not None and any(s % every == 0 for s in range(first, first + updates)):
            grid = self._folder.samples / f"step-{first}.png"
            with self._world.agreed():
                draw_grid(rollout, self._world, grid)
            self._trackers.image(first, grid)

    def _scoring(self) -> Metrics:
        counts = self._scorer.counts()
        since = {name: now.since(self._counts[name]) for name, now in counts.items()}
        self._counts = counts
        return scoring_metrics(summed_counts(self._world.gather(since)))

    def _times(self) -> Metrics:
        """Of this process, and where there are others, what it waited for them."""
        waited, self._waited = self._world.waited - self._waited, self._world.waited
        return self.display.take_times() | ({} if self._world.size == 1 else {"time/waiting": waited})


def scoring_metrics(counts: Mapping[str, Counts]) -> Metrics:
    """What each reward did since the last line; nothing for rewards that had nothing to do."""
    metrics: Metrics = {}
    for name, done in counts.items():
        if done.calls:
            metrics[f"time/reward/{name}"] = done.seconds / done.calls
            metrics[f"scoring/failures/{name}"] = done.failures
            metrics[f"scoring/retries/{name}"] = done.retries
        if done.cached:
            metrics[f"scoring/cached/{name}"] = done.cached
    return metrics


def summed_counts(parts: Sequence[Mapping[str, Counts]]) -> dict[str, Counts]:
    """What each reward did in all processes together."""
    first, *others = parts
    return {
        name: Counts(**{key: value + sum(getattr(o[name], key) for o in others) for key, value in vars(done).items()})
        for name, done in first.items()
    }


def draw_grid(rollout: Rollout, world: World, path: Path) -> None:
    """Some images of some groups of all processes, each group under its prompt."""
    chosen = rollout.drawn[:: max(1, len(rollout.drawn) // GRID_PROMPTS)][:GRID_PROMPTS]
    size, slots = rollout.group_size, {group.slot for group in chosen}
    own = {
        group.slot: rollout.images[i * size : i * size + min(size, GRID_IMAGES)]
        for i, group in enumerate(rollout.groups)
        if group.slot in slots
    }
    images = {slot: rows for part in world.gather_first(own) for slot, rows in part.items()}
    if world.first:
        save_image(image_grid([(group.prompt.text, images[group.slot]) for group in chosen]), path)
