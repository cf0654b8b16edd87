"""Settings of the trackers: programs that show a run's figures and pictures while it goes on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from marble_rl.section import FilePath, Section

PROJECT = "marble"


class TensorboardTracker(Section):
    """Event files on this machine; needs the extra `tensorboard`."""

    type: Literal["tensorboard"]
    dir: FilePath | None = None
    """Folder in which each run gets one of its own, named like the run folder; null writes to `tensorboard/` in the run
    folder. Relative to the config file."""


class WandbTracker(Section):
    """Weights & Biases; needs the extra `wandb`."""

    type: Literal["wandb"]
    project: str = PROJECT
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; null takes the account's own."""
    name: str | None = None
    """Name of the run; null takes that of the run folder."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: list[str] = []
    """Words to find the run by."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` only writes to the run folder, for `wandb sync`; `disabled` does nothing. null takes the environment's
    `WANDB_MODE`, else `online`."""


class TrackioTracker(Section):
    """Trackio, on this machine or in a Hugging Face Space; needs the extra `trackio`."""

    type: Literal["trackio"]
    project: str = PROJECT
    """Project that the run belongs to."""
    name: str | None = None
    """Name of the run; null takes that of the run folder."""
    space_id: str | None = None
    """Space to log to, such as `user/space`, made if there is none; null logs to this machine."""


TrackerConfig = TensorboardTracker | WandbTracker | TrackioTracker


def _spelled_out(trackers: Any) -> Any:
    """``[tensorboard]`` is short for ``[{type: tensorboard}]``."""
    if not isinstance(trackers, list):
        return trackers
    return [{"type": tracker} if isinstance(tracker, str) else tracker for tracker in trackers]


TrackerList = Annotated[
    list[Annotated[TrackerConfig, Field(discriminator="type")]],
    BeforeValidator(_spelled_out),
]
