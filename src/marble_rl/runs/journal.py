"""The journal of a run: writes each step's metrics and images to metrics.jsonl, samples/, trackers and the display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from marble_rl.config import RunConfig
from marble_rl.config.trackers import TrackerConfig
from marble_rl.devices import peak_bytes
from marble_rl.distributed.world import World
from marble_rl.errors import count_of
from marble_rl.rewards.core.calls import Counts
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.images import VIDEO_TILE, image_grid, save_sheet, shrunk
from marble_rl.runs.log import DROPPED, Display, MetricsFile
from marble_rl.runs.run_log import LOG
from marble_rl.runs.trackers import Trackers
from marble_rl.runs.trackers.base import TrackedRun
from marble_rl.types import Metrics, Rollout

GRID_PROMPTS, GRID_IMAGES = 8, 8
VIDEO_PROMPTS, VIDEOS = 4, 4
"""Of a grid of videos, in which all of them play."""


def tracker_settings(config: RunConfig, world: World) -> list[TrackerConfig]:
    """The trackers of the config on rank 0, none on the other ranks."""
    return config.logging.trackers if world.first else []


class Journal(ExitStack):
    """Every rank has one, because some metrics need collectives; only rank 0 writes files."""

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
        """``step``: updates done. Lines of later steps, logged before a crash, are moved to another file: those steps
        are run again."""
        super().__init__()
        self._config = config
        self._folder = folder
        self._world = world
        self._scorer = scorer
        self._device = device
        self._file = MetricsFile(folder.metrics, step) if world.first else None
        logged = 0 if self._file is None else self._file.logged
        if self._file is not None and self._file.dropped:
            moved = count_of(self._file.dropped, "line")
            LOG.info(f"metrics.jsonl: moved {moved} of steps after {step}, or damaged, to {DROPPED}")
        tracked = TrackedRun(folder.root, config, step, logged)
        self._trackers = Trackers(tracker_settings(config, world), tracked, LOG.info)
        self.display = Display(console, config.trainer.steps, step, config.trained_rewards, config.logging.print_every)
        self._counts = scorer.counts()
        """Counts of each reward when the last line was logged"""
        self._collective_seconds = world.collective_seconds
        """Time spent in collectives when the last line was logged"""
        self._painter = ThreadPoolExecutor(1, thread_name_prefix="grid")
        self._painting: tuple[int, Future[Path] | None] | None = None
        """The step of the grid that is being made, and on rank 0 its file to come"""

    def __enter__(self) -> Journal:
        self.enter_context(self._trackers)
        self.enter_context(self.display.progress)
        self.enter_context(self._painter)  # a grid under way is finished, whatever ended the run
        return self

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of a step to all outputs, once its grid is written. Time, memory and reward calls are added
        to ``metrics`` itself.

        If the ranks can no longer talk to each other, the step is written without what they would have gathered: its
        checkpoint is about to be saved."""
        peak = peak_bytes(self._device)
        try:
            self._finish_images()
            metrics |= self._scoring()
            peak = self._world.largest(peak)
        finally:
            metrics |= self._times()
            metrics["memory/peak_mb"] = peak / 2**20
            self._trackers.log(step, metrics)  # before the file, so that trackers have every step that the file has
            if self._file is not None:
                self._file.append(step, metrics)
            self.display.step_done(step + 1, metrics)

    def save_images(self, rollout: Rollout, step: int) -> None:
        """Begin to write a grid of the rollout's images to samples/ and the trackers, if one of its updates is the last
        of the run or one that `images_every` falls on. ``step``: any of its updates.

        The grid is drawn beside the training; `log` waits for it, and raises what went wrong."""
        every, each = self._config.logging.images_every, self._config.rollout.steps_each
        first, last = step - step % each, self._config.trainer.steps - 1
        if every is None or not any(s % every == 0 or s == last for s in range(first, first + each)):
            return
        self._finish_images()  # of a rollout that was dropped
        with self._world.failing_together():
            rows = shown_rows(rollout, self._world)
        file, fps = self._folder.samples / f"step-{first}", self._config.logging.fps
        grid = self._painter.submit(lambda: save_sheet(image_grid(rows), file, fps=fps)) if self._world.first else None
        self._painting = first, grid

    def _finish_images(self) -> None:
        if self._painting is not None:
            (first, grid), self._painting = self._painting, None
            with self._world.failing_together():
                if grid is not None:
                    self._trackers.image(first, grid.result())

    def _scoring(self) -> Metrics:
        """Metrics of the reward calls of all ranks since the last line."""
        counts = self._scorer.counts()
        since = {name: now.since(self._counts[name]) for name, now in counts.items()}
        self._counts = counts
        return scoring_metrics(summed_counts(self._world.gather(since)))

    def _times(self) -> Metrics:
        """Times of this rank's stages since the last line; with several ranks, also its time in collectives."""
        before, self._collective_seconds = self._collective_seconds, self._world.collective_seconds
        waiting = {} if self._world.size == 1 else {"time/waiting": self._collective_seconds - before}
        return self.display.take_times() | waiting


def scoring_metrics(counts: Mapping[str, Counts]) -> Metrics:
    """Metrics of each reward's calls; none for rewards that were not called."""
    metrics: Metrics = {}
    for name, done in counts.items():
        if done.calls:
            metrics[f"time/reward/{name}"] = done.seconds / done.calls
            metrics[f"scoring/failures/{name}"] = done.failures
            metrics[f"scoring/retries/{name}"] = done.retries
    return metrics


def summed_counts(parts: Sequence[Mapping[str, Counts]]) -> dict[str, Counts]:
    """Each reward's counts, summed over ranks."""
    first, *others = parts
    return {
        name: Counts(**{key: value + sum(getattr(o[name], key) for o in others) for key, value in vars(done).items()})
        for name, done in first.items()
    }


def shown_rows(rollout: Rollout, world: World) -> list[tuple[str, Tensor]]:
    """A few groups from all ranks, each its prompt and some of its images; empty on ranks other than 0."""
    moving = rollout.images.ndim == 5
    prompts, most = (VIDEO_PROMPTS, VIDEOS) if moving else (GRID_PROMPTS, GRID_IMAGES)
    chosen = rollout.drawn[:: max(1, len(rollout.drawn) // prompts)][:prompts]
    size, slots = rollout.group_size, {group.slot for group in chosen}
    own = {
        group.slot: rollout.images[i * size : i * size + min(size, most)]
        for i, group in enumerate(rollout.groups)
        if group.slot in slots
    }
    if moving and world.size > 1:  # videos in full size are too much to send
        own = {slot: torch.stack([shrunk(video, VIDEO_TILE) for video in rows]) for slot, rows in own.items()}
    images = {slot: rows for part in world.gather_first(own) for slot, rows in part.items()}
    return [(group.prompt.text, images[group.slot]) for group in chosen] if world.first else []
