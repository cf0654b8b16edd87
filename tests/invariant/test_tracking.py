"""A run is shown while it goes on: what trackers are told is what the run folder holds, and the run is the same."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clips import ball
from events import Shown, pixels, written
from marble_rl.runs.images import image_grid, save_sheet
from marble_rl.runs.media import opened_frames
from runs import lora_bytes, marble, start, train, write_config

TRACKIO = Path(sys.prefix) / "trackio"
"""Where `make test-full` puts Trackio, with the Pillow that it asks for."""

REPEATED = ("time/", "memory/", "scoring/", "step")
"""Steps 3 and 4 are taken twice here, at another pace; these trackers keep what they had of them."""


def config_of(folder: Path, model: Path, trackers: list[Any], steps: int = 8) -> Path:
    """Its grids are of steps 0, 4 and 6 (the rollout of the last step), its evaluations after steps 4 and 8."""
    return write_config(
        folder / "config.yaml",
        model,
        logging={"images_every": 4, "trackers": trackers},
        trainer={"steps": steps, "save_every": 3, "micro_batch": 8, "eval_every": 4},
    )


def crash_after_checkpoint(run: Path) -> None:
    """Of a run that logged 5 steps: what it knows is 3 steps, in the middle of a rollout."""
    shutil.rmtree(run / "checkpoints" / "step-5")
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-3"]


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without(figures: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if not key.startswith(prefixes)}


@pytest.mark.full
def test_tensorboard_shows_what_the_run_folder_holds(tiny_sd3: Path, tmp_path: Path) -> None:
    plain, run = tmp_path / "plain", tmp_path / "run"
    train(config_of(tmp_path, tiny_sd3, []), plain)
    config = config_of(tmp_path, tiny_sd3, ["tensorboard"])
    train(config, run, "--set", "trainer.steps=5")
    crash_after_checkpoint(run)
    train(config, run, "--resume")

    assert lora_bytes(run) == lora_bytes(plain)
    shown = Shown(run / "tensorboard")
    assert shown.figures() == written(run)
    assert {step for step, key, _ in shown.figures() if key == "eval/bright"} == {3, 7}
    assert shown.pictures() == [(step, pixels(run / "samples" / f"step-{step}.png")) for step in (0, 4, 6)]
    assert not (plain / "tensorboard").exists()


def test_trackers_may_change_on_resume_and_a_failing_one_costs_nothing(tiny_sd3: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config_of(tmp_path, tiny_sd3, [], steps=2), run)
    (tmp_path / "events").write_text("a file where a folder is wanted")
    failing = config_of(tmp_path, tiny_sd3, [{"type": "tensorboard", "dir": "events"}], steps=4)
    outcome = train(failing, run, "--resume")
    assert outcome.err.count("the tracker tensorboard could not start") == 1
    assert "another run" not in outcome.err
    assert [line["step"] for line in lines_of(run)] == [0, 1, 2, 3]


@pytest.mark.parametrize("command", [("train",), ("config", "check")])
def test_a_missing_package_is_found_before_anything_is_loaded(
    command: tuple[str, ...], tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    run = tmp_path / "run"
    config = config_of(tmp_path, tiny_sd3, ["trackio"])
    outcome = marble(*command, config, *(["--out", run] if command == ("train",) else []))
    assert outcome.code == 2
    assert "logging.trackers.0: trackio needs the package trackio" in outcome.err
    assert "pip install 'marble-rl[trackio]'" in outcome.err
    assert not run.exists()


def run_with(config: Path, run: Path, *arguments: object, **environment: str) -> None:
    process = start("train", config, "--out", run, *arguments, env={**os.environ, **environment})
    output, _ = process.communicate()
    assert process.returncode == 0, output


def wandb_history(file: Path) -> Iterator[dict[str, Any]]:
    """Steps in an offline file, whose format is that of LevelDB's log: blocks of 32 KB, records in pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            items = Record.FromString(record).history.item
            record = b""
            if items:
                yield {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


@pytest.mark.full
def test_wandb_offline(tiny_sd3: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = config_of(tmp_path, tiny_sd3, [{"type": "wandb", "mode": "offline"}])
    run_with(config, run, "--set", "trainer.steps=5")
    crash_after_checkpoint(run)
    run_with(config, run, "--resume")

    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    identity = json.loads((run / "trackers.json").read_text())["wandb"]
    assert [file.name for file in files] == [f"run-{identity}.wandb"] * 2
    steps = [step for file in files for step in wandb_history(file)]
    told = [without(step, (*REPEATED, "_", "samples")) for step in steps]
    assert told == [without(line, REPEATED) for line in lines_of(run)]
    assert [step["_step"] for step in steps] == list(range(8))
    assert [step["_step"] for step in steps if step.get("samples._type") == "image-file"] == [0, 4, 6]
    pictures = (run / "wandb").glob("offline-run-*/files/media/images/*.png")
    assert sorted(map(pixels, pictures)) == sorted(pixels(run / "samples" / f"step-{step}.png") for step in (0, 4, 6))


@pytest.mark.full
def test_trackio_on_this_machine(tiny_sd3: Path, tmp_path: Path) -> None:
    assert (TRACKIO / "trackio").is_dir(), "run `make trackio`"
    run, store = tmp_path / "run", tmp_path / "store"
    config = config_of(tmp_path, tiny_sd3, [{"type": "trackio", "project": "tests"}])
    here = os.pathsep.join([str(TRACKIO), os.environ.get("PYTHONPATH", "")])
    run_with(config, run, "--set", "trainer.steps=5", PYTHONPATH=here, TRACKIO_DIR=str(store))
    crash_after_checkpoint(run)
    run_with(config, run, "--resume", PYTHONPATH=here, TRACKIO_DIR=str(store))

    with sqlite3.connect(store / "tests.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    assert len({run_id for run_id, *_ in rows}) == 1
    assert [(name, step) for _, name, step, _ in rows] == [("run", step) for step in range(8)]
    told = [json.loads(metrics) for *_, metrics in rows]
    pictures = {step: figures.pop("samples") for step, figures in enumerate(told) if "samples" in figures}
    assert [without(figures, REPEATED) for figures in told] == [without(line, REPEATED) for line in lines_of(run)]
    assert list(pictures) == [0, 4, 6]
    for step, picture in pictures.items():
        assert pixels(store / "media" / picture["file_path"]) == pixels(run / "samples" / f"step-{step}.png")


SHOW_VIDEO = """
import sys
from pathlib import Path
from marble_rl.config import load_config
from marble_rl.runs.trackers import Trackers
from marble_rl.runs.trackers.base import TrackedRun

folder = Path(sys.argv[1])
config = load_config(folder / "config.yaml")
with Trackers(config.logging.trackers, TrackedRun(folder, config, 0, 0), print) as trackers:
    trackers.image(0, folder / "step-0.webp")
    trackers.log(0, {"reward/a": 1.0})
"""


def shown_video(folder: Path, tracker: dict[str, Any], **environment: str) -> None:
    """Log a grid of a video, in a process of its own."""
    config_of(folder, Path("mini"), [tracker])
    save_sheet(image_grid([("a ball", ball(frames=5)[None])]), folder / "step-0", fps=5)
    command = [sys.executable, "-c", SHOW_VIDEO, str(folder)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert "could not" not in done.stdout + done.stderr


def assert_plays(files: list[Path]) -> None:
    (file,) = files
    with Image.open(file) as video:
        assert (video.format, video.n_frames, opened_frames(video)[1]) == ("GIF", 5, 5)


@pytest.mark.full
def test_wandb_shows_videos(tmp_path: Path) -> None:
    shown_video(tmp_path, {"type": "wandb", "mode": "offline"})
    assert_plays(list((tmp_path / "wandb").glob("offline-run-*/files/media/videos/*.gif")))


@pytest.mark.full
def test_trackio_shows_videos(tmp_path: Path) -> None:
    assert (TRACKIO / "trackio").is_dir(), "run `make trackio`"
    here = os.pathsep.join([str(TRACKIO), os.environ.get("PYTHONPATH", "")])
    shown_video(tmp_path, {"type": "trackio"}, PYTHONPATH=here, TRACKIO_DIR=str(tmp_path / "store"))
    assert_plays(list((tmp_path / "store" / "media").rglob("*.gif")))
