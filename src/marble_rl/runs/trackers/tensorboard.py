"""TensorBoard: event files in the run folder, shown by `tensorboard --logdir runs`."""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from marble_rl.config.loading import to_yaml
from marble_rl.config.trackers import TensorboardTracker
from marble_rl.runs.media import gif_of
from marble_rl.runs.trackers.base import GRID, VIDEO, TrackedRun
from marble_rl.types import Metrics


class EventFiles:
    """A new event file each time the run is started or resumed; all of them together are the run."""

    def __init__(self, settings: TensorboardTracker, run: TrackedRun) -> None:
        folder = _folder(settings, run)
        self.identity = str(folder)
        # Readers drop the steps from purge_step on of earlier files: those steps are made again.
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)
        self._writer.add_text("config", f"```yaml\n{to_yaml(run.config)}```", run.first_step)

    def log(self, step: int, metrics: Metrics, grid: Path | None) -> None:
        for key, value in sorted(metrics.items()):
            self._writer.add_scalar(key, value, step)
        if grid is not None:
            with Image.open(grid) as picture:
                if grid.suffix == VIDEO:
                    self._add_video(grid, picture.size, step)
                else:
                    self._writer.add_image(GRID, np.asarray(picture.convert("RGB")), step, dataformats="HWC")
        self._writer.flush()

    def _add_video(self, grid: Path, size: tuple[int, int], step: int) -> None:
        """An image that is a GIF, as `add_video` writes it with moviepy."""
        width, height = size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif_of(grid))
        self._writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=GRID, image=image)]), step)

    def finish(self, exit_code: int) -> None:
        self._writer.close()


def _folder(settings: TensorboardTracker, run: TrackedRun) -> Path:
    """A separate folder for each run in `dir`: readers would drop what another run of the same name logged."""
    if settings.dir is None:
        return run.folder / "tensorboard"  # also if the run folder was moved
    if run.identity is not None and Path(run.identity).parent == settings.dir:
        return Path(run.identity)
    names = chain([run.name], (f"{run.name}-{i}" for i in count(2)))
    return next(folder for folder in map(settings.dir.joinpath, names) if not any(folder.glob("events.*")))
