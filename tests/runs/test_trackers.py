"""Trackers: their settings, what TensorBoard reads back, and failures that cost the tracker alone."""

from __future__ import annotations

import io
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from clips import ball
from events import Shown, pixels
from marble_rl.config import RunConfig, dump_config, load_config
from marble_rl.config.trackers import TensorboardTracker, TrackioTracker, WandbTracker
from marble_rl.errors import InputError, Interrupted
from marble_rl.runs.images import image_grid, save_sheet
from marble_rl.runs.trackers import Trackers, check_trackers
from marble_rl.runs.trackers.base import TrackedRun
from runs import write_config

TENSORBOARD = TensorboardTracker(type="tensorboard")


def config_with(folder: Path, *trackers: Any) -> RunConfig:
    return load_config(write_config(folder / "config.yaml", Path("mini"), logging={"trackers": list(trackers)}))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return config_with(tmp_path)


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    images = torch.arange(2 * 8 * 8 * 3, dtype=torch.uint8).reshape(2, 8, 8, 3)
    return save_sheet(image_grid([("a kite", images)]), tmp_path / "step-0")


def test_a_type_alone_is_short_for_its_defaults(tmp_path: Path) -> None:
    config = config_with(tmp_path, "tensorboard", "wandb", {"type": "trackio", "space_id": "me/runs"})
    assert config.logging.trackers == [
        TensorboardTracker(type="tensorboard", dir=None),
        WandbTracker(type="wandb", project="marble", name=None, mode=None),
        TrackioTracker(type="trackio", project="marble", name=None, space_id="me/runs"),
    ]
    (tmp_path / "config.json").write_text(dump_config(config))
    assert load_config(tmp_path / "config.json") == config
    assert config_with(tmp_path).logging.trackers == []


def test_event_folder_counts_from_the_config(tmp_path: Path) -> None:
    (tracker,) = config_with(tmp_path, {"type": "tensorboard", "dir": "events"}).logging.trackers
    assert tracker == TensorboardTracker(type="tensorboard", dir=tmp_path.resolve() / "events")


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_named_with_its_extra(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trackers = config_with(tmp_path, kind).logging.trackers
    for name in [name for name in sys.modules if name.partition(".")[0] == kind]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    missing = rf"logging\.trackers\.0: {kind} needs the package {kind}.* pip install 'marble-rl\[{kind}\]'"
    with pytest.raises(InputError, match=missing):
        check_trackers(trackers)
    (tmp_path / kind).mkdir()  # such as the folder `wandb` that it leaves wherever it ran
    with pytest.raises(InputError, match=missing):
        check_trackers(trackers)
    (tmp_path / kind / "__init__.py").touch()
    check_trackers(trackers)


def test_a_tracker_given_twice() -> None:
    with pytest.raises(InputError, match=r"logging\.trackers\.1: tensorboard is given twice"):
        check_trackers([TENSORBOARD, TENSORBOARD])


def test_tensorboard_shows_a_crashed_and_resumed_run_once(tmp_path: Path, config: RunConfig, grid: Path) -> None:
    said: list[str] = []
    with Trackers([TENSORBOARD], TrackedRun(tmp_path, config, 0, 0), said.append) as first:
        for step in range(5):
            first.image(step, grid)
            first.log(step, {"reward/a": float(step), "loss/policy": 0.5})
    with Trackers([TENSORBOARD], TrackedRun(tmp_path, config, 3, 5), said.append) as second:
        for step in range(3, 6):
            second.log(step, {"reward/a": float(step)})
    shown = Shown(tmp_path / "tensorboard")
    figures = shown.figures()
    assert [figure for figure in figures if figure[1] == "reward/a"] == [(s, "reward/a", float(s)) for s in range(6)]
    assert [figure for figure in figures if figure[1] == "loss/policy"] == [(s, "loss/policy", 0.5) for s in range(3)]
    assert shown.pictures() == [(s, pixels(grid)) for s in range(3)]
    assert "alpha: 8.0" in shown.config()
    assert said == []


def test_tensorboard_in_a_folder_for_all_runs(tmp_path: Path, config: RunConfig) -> None:
    settings = TensorboardTracker(type="tensorboard", dir=tmp_path / "events")
    (tmp_path / "first").mkdir()
    with Trackers([settings], TrackedRun(tmp_path / "first", config, 0, 0), print) as trackers:
        trackers.log(0, {"reward/a": 1.0})
    assert Shown(tmp_path / "events" / "first").figures() == [(0, "reward/a", 1.0)]


def test_runs_of_one_name_have_folders_of_their_own_in_tensorboard(tmp_path: Path, config: RunConfig) -> None:
    """Also after --resume: each finds its own again."""
    settings = TensorboardTracker(type="tensorboard", dir=tmp_path / "events")
    for place in ("a", "b", "a"):
        run = tmp_path / place / "run"
        resumed = run.exists()
        run.mkdir(parents=True, exist_ok=True)
        with Trackers([settings], TrackedRun(run, config, int(resumed), int(resumed)), print) as trackers:
            trackers.log(int(resumed), {"reward/a": ord(place)})
    assert Shown(tmp_path / "events" / "run").figures() == [(0, "reward/a", 97.0), (1, "reward/a", 97.0)]
    assert Shown(tmp_path / "events" / "run-2").figures() == [(0, "reward/a", 98.0)]


def test_event_files_go_with_a_run_that_was_moved_and_to_a_folder_that_was_changed(
    tmp_path: Path, config: RunConfig
) -> None:
    def log(settings: TensorboardTracker, run: Path, step: int) -> None:
        with Trackers([settings], TrackedRun(run, config, step, step), print) as trackers:
            trackers.log(step, {"reward/a": float(step)})

    here = TensorboardTracker(type="tensorboard")
    (tmp_path / "a").mkdir()
    log(here, tmp_path / "a", 0)
    (tmp_path / "a").rename(tmp_path / "b")
    log(here, tmp_path / "b", 1)
    assert not (tmp_path / "a").exists()
    assert Shown(tmp_path / "b" / "tensorboard").figures() == [(0, "reward/a", 0.0), (1, "reward/a", 1.0)]
    log(TensorboardTracker(type="tensorboard", dir=tmp_path / "events"), tmp_path / "b", 2)
    assert Shown(tmp_path / "events" / "b").figures() == [(2, "reward/a", 2.0)]


def test_a_grid_is_shown_with_its_step_or_not_at_all(tmp_path: Path, config: RunConfig, grid: Path) -> None:
    """Resumed in the middle of a rollout: its grid was shown when the rollout began."""
    with Trackers([TENSORBOARD], TrackedRun(tmp_path, config, 3, 3), print) as trackers:
        trackers.image(2, grid)
        trackers.log(3, {"reward/a": 0.0})
        trackers.image(4, grid)
        trackers.log(4, {"reward/a": 0.0})
        trackers.log(5, {"reward/a": 0.0})
        trackers.image(6, grid)  # and the step fails
    assert [step for step, _ in Shown(tmp_path / "tensorboard").pictures()] == [4]


def test_tensorboard_shows_a_grid_of_videos_as_gif(tmp_path: Path, config: RunConfig) -> None:
    grid = save_sheet(image_grid([("a ball", ball(frames=5)[None])]), tmp_path / "step-0", fps=5)
    with Trackers([TENSORBOARD], TrackedRun(tmp_path, config, 0, 0), print) as trackers:
        trackers.image(0, grid)
        trackers.log(0, {"reward/a": 0.0})
    ((step, data),) = Shown(tmp_path / "tensorboard").files()
    assert step == 0
    with Image.open(io.BytesIO(data)) as shown, Image.open(grid) as written:
        assert (shown.format, shown.n_frames, shown.size) == ("GIF", 5, written.size)
        assert shown.info["duration"] == 200


def test_a_tracker_that_cannot_start_is_left_out(tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    said: list[str] = []
    with Trackers([TENSORBOARD], TrackedRun(tmp_path, config, 0, 0), said.append) as trackers:
        trackers.log(0, {"reward/a": 1.0})
        trackers.log(1, {"reward/a": 1.0})
    (warning,) = said
    assert "the tracker tensorboard could not start" in warning
    assert "The run continues without it" in warning


def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path: Path, config: RunConfig) -> None:
    said: list[str] = []
    with Trackers([TENSORBOARD], TrackedRun(tmp_path, config, 0, 0), said.append) as trackers:
        trackers.log(0, {"reward/a": 1.0})
        trackers.image(1, tmp_path / "deleted.png")
        trackers.log(1, {"reward/b": 1.0})
        trackers.log(2, {"reward/a": 1.0})
    (warning,) = said
    assert "the tracker tensorboard could not log step 1 (FileNotFoundError" in warning
    assert (0, "reward/a", 1.0) in Shown(tmp_path / "tensorboard").figures()
    assert not any(step == 2 for step, _, _ in Shown(tmp_path / "tensorboard").figures())


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (InputError("x"), 2), (Interrupted(2, "x"), 130), (RuntimeError("x"), 1)]
)
def test_trackers_learn_how_the_run_ended(
    tmp_path: Path, config: RunConfig, error: Exception | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from marble_rl.runs.trackers.tensorboard import EventFiles

    codes: list[int] = []
    finish = EventFiles.finish
    monkeypatch.setattr(EventFiles, "finish", lambda self, code: (codes.append(code), finish(self, code)))
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, Trackers([TENSORBOARD], TrackedRun(tmp_path, config, 0, 0), print):
        if error is not None:
            raise error
    assert codes == [code]
