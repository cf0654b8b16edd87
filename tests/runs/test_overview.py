"""`marble runs`: how far each run came and how it ended, from its files alone."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runs import marble

START = "start one: marble train"


def cut(run: Path, lines: int, checkpoint: int, rest: str = "") -> None:
    """Make a finished run one that ended early."""
    log = run / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:lines]) + rest)
    shutil.rmtree(run / "lora")
    for folder in (run / "checkpoints").iterdir():
        if folder.name != f"step-{checkpoint}":
            shutil.rmtree(folder)


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    outcome = marble("runs", folder, "--json")
    assert outcome.code == 0, outcome.err
    return {run["path"].removeprefix(f"{folder}/"): run for run in json.loads(outcome.out)["runs"]}


@pytest.fixture
def copied(finished_run: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(finished_run, tmp_path / name, ignore=shutil.ignore_patterns("samples")))

    return copy


def test_each_run_with_its_status_and_progress(copied: Callable[[str], Path], tmp_path: Path) -> None:
    copied("finished")
    cut(copied("group/stopped"), 6, 6)
    cut(copied("group/crashed"), 7, 6, '{"step": 7, "rew')
    cut(copied("begun"), 0, 0)
    running = copied("running")
    cut(running, 7, 6)
    with open(running / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = listed(tmp_path)
        text = marble("runs", tmp_path).out
    found = {name: (run["status"], run["certain"], run["steps_done"], run["saved"]) for name, run in runs.items()}
    assert found == {
        "finished": ("finished", True, 8, 8),
        "group/stopped": ("stopped", True, 6, 6),
        "group/crashed": ("crashed", True, 7, 6),
        "begun": ("stopped", True, 0, None),
        "running": ("running", True, 7, 6),
    }
    assert {run["steps"] for run in runs.values()} == {8}
    assert {(run["rule"], run["seed"]) for run in runs.values()} == {("marble", 0)}
    assert all(run["size"] > 1000 for run in runs.values())
    assert "crashed: ended without saving its last steps" in text
    assert "7/8" in text


def test_the_lora_of_an_earlier_end_does_not_make_a_run_finished(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Resumed for more steps, and killed after the last was logged."""
    run = copied("run")
    config = json.loads((run / "config.json").read_text())
    config["trainer"]["steps"] = 9
    (run / "config.json").write_text(json.dumps(config))
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 8}\n')
    assert listed(tmp_path)["run"]["status"] == "crashed"


@pytest.mark.parametrize(("minutes", "status"), [(0, "running"), (600, "stopped")])
def test_of_a_run_on_another_machine_the_log_decides(
    copied: Callable[[str], Path], tmp_path: Path, minutes: int, status: str
) -> None:
    run = copied("far")
    cut(run, 6, 6)
    (run / ".lock").write_text("another-machine")
    then = time.time() - 60 * minutes
    os.utime(run / "metrics.jsonl", (then, then))
    (far,) = listed(tmp_path).values()
    assert (far["status"], far["certain"]) == (status, False)
    text = marble("runs", tmp_path).out
    assert f"{status}?" in text
    assert "the lock of another machine cannot be asked" in text


def test_scores_are_those_of_the_newest_evaluation_and_else_of_training(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in (copied("run") / "metrics.jsonl").read_text().splitlines()]
    run = tmp_path / "run"
    last = {name: lines[-1][f"reward/{name}"] for name in ("small", "bright", "colour")}
    assert listed(tmp_path)["run"]["training"] == {"step": 8, "means": pytest.approx(last)}
    assert listed(tmp_path)["run"]["evaluation"] is None
    assert "(training, step 8)" in marble("runs", tmp_path).out

    lines[3]["eval/bright"] = 0.25
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert listed(tmp_path)["run"]["evaluation"] == {"step": 4, "means": {"bright": 0.25}}
    assert "bright 0.25  (evaluated after step 4)" in marble("runs", tmp_path).out

    (run / "evaluation").mkdir()
    weights = {"base": {"means": {"bright": 0.1}}, "ema": {"means": {"bright": 0.5}}}
    (run / "evaluation" / "scores.json").write_text(json.dumps({"step": 8, "weights": weights}))
    assert listed(tmp_path)["run"]["evaluation"] == {"step": 8, "means": {"bright": 0.5}}


def test_a_job_of_a_comparison_has_its_evaluation_beside_it(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run = copied("study/jobs/marble-seed0/run")
    (run.parent / "config.json").write_text("{}")
    (run.parent / "identity.json").write_text("{}")
    (run.parent / "evaluation").mkdir()
    scores = {"step": 8, "weights": {"ema": {"means": {"bright": 0.5}}}}
    (run.parent / "evaluation" / "scores.json").write_text(json.dumps(scores))
    runs = listed(tmp_path)
    assert list(runs) == ["study/jobs/marble-seed0/run"]
    assert runs["study/jobs/marble-seed0/run"]["evaluation"] == {"step": 8, "means": {"bright": 0.5}}


def test_a_broken_folder_is_named_and_the_others_are_listed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    copied("whole")
    (copied("no-config") / "config.json").unlink()
    (copied("damaged") / "config.json").write_text('{"model":')
    (copied("odd") / "config.json").write_text('{"model": {"path": "x"}, "trainer": {}}')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")  # of a pipeline: no run, and none of our business
    outcome = marble("runs", tmp_path)
    assert outcome.code == 0
    assert "whole" in outcome.out
    for words in (
        f"not readable: {tmp_path / 'no-config'}: it has no config.json",
        f"not readable: {tmp_path / 'damaged'}: its config.json is damaged",
        f"not readable: {tmp_path / 'odd'}: its config.json has no 'steps'",
    ):
        assert words in outcome.err
    assert "model" not in outcome.err.replace("models", "")
    broken = json.loads(marble("runs", tmp_path, "--json").out)["broken"]
    assert [Path(entry["path"]).name for entry in broken] == ["damaged", "no-config", "odd"]


def test_the_run_written_last_comes_first(copied: Callable[[str], Path], tmp_path: Path) -> None:
    for name, age in (("a", 30), ("b", 10), ("c", 20)):
        then = time.time() - 3600 * age
        os.utime(copied(name) / "metrics.jsonl", (then, then))
    assert list(listed(tmp_path)) == ["b", "c", "a"]
    text = marble("runs", tmp_path).out
    assert "10 h ago" in text
    assert "1 d ago" in text


def test_where_there_is_nothing_it_says_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for given in ([tmp_path / "empty"], []):
        monkeypatch.chdir(tmp_path)
        outcome = marble("runs", *given)
        assert outcome.code == 0
        assert START in outcome.out
    missing = marble("runs", tmp_path / "nowhere")
    assert missing.code == 2
    assert f"{tmp_path / 'nowhere'} is not a folder" in missing.err


def test_it_loads_no_torch(finished_run: Path) -> None:
    """Which would take seconds."""
    lines = ["import atexit, sys", "atexit.register(lambda: print({'torch', 'numpy', 'yaml'} & sys.modules.keys()))"]
    script = "; ".join([*lines, "from marble_rl.cli import main", "main(['runs', sys.argv[1]])"])
    command = [sys.executable, "-c", script, str(finished_run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert done.stdout.endswith("set()\n")
