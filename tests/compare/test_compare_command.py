"""`marble compare` without training: its files, what it refuses, and its display."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from jobs import finish, plan, result
from marble_rl.charts.style import LIGHT
from marble_rl.compare import runner
from marble_rl.compare.display import JobsDisplay
from marble_rl.compare.job_result import Failure, read_results
from marble_rl.compare.jobs import Job
from marble_rl.compare.table import Comparison
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import StorageFailed
from runs import marble


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Results of three methods and a hole, and nothing else."""
    crash = Failure("train", 3, ["step 4", "stopped: reward 'a' fell over", ""])
    results = [
        *(result("weighted_sum", s, {"a": [1.0 + s], "b": [2.0]}, held_out=["b"]) for s in (0, 1)),
        *(
            result("marble", s, {"a": [2.0 + s], "b": [3.0 + s / 10]}, held_out=["b"], training=t, train_seconds=90.0)
            for s, t in enumerate([{"heldout/min_cos": 0.25}, {"heldout/min_cos": 0.75}])
        ),
        result("gdpo", 0, {}, failed=crash),
    ]
    for entry in results:
        entry.write(tmp_path / "jobs" / f"{entry.method}-seed{entry.seed}.json")
    return tmp_path


def test_the_table_is_made_from_the_results_alone(out: Path) -> None:
    outcome = marble("compare", out, "--table-only")
    assert outcome.code == 1
    assert "1 job crashed: gdpo seed 0" in outcome.err
    text = (out / "table.md").read_text()
    assert "| method | n | a | b* | minutes | s/step |" in text
    assert "| marble | 2 | **2.5** ±6.4 | **3.05** ±0.64 |" in text
    assert "| 1.5 |" in text
    assert "HOLE: gdpo seed 0 crashed (train, exit code 3): stopped: reward 'a' fell over" in text
    assert "| marble | 2 | ▲ +1.000 ±0.000 | ▲ +1.05 ±0.64 |" in text
    assert "| marble | 0.50 |" in text
    for word in ("marble", "weighted_sum", "2.5", "±6.4", "b*", "HOLE"):
        assert word in outcome.out

    assert json.loads((out / "compare.json").read_text()) == json.loads(
        marble("compare", out, "--table-only", "--json").out
    )
    comparison = Comparison.read(out / "compare.json")
    assert [row.method for row in comparison.rows] == ["weighted_sum", "marble"]
    assert comparison.rows[1].figures["a"].mean == 2.5
    lines = list(csv.DictReader(io.StringIO((out / "compare.csv").read_text())))
    assert [(line["method"], line["column"]) for line in lines] == [
        (method, column) for method in ("weighted_sum", "marble") for column in ("a", "b")
    ]
    assert (lines[2]["mean"], lines[2]["difference"], lines[2]["n"], lines[2]["held_out"]) == ("2.5", "1.0", "2", "0")
    assert lines[0]["difference"] == ""


def test_the_picture_shows_something(out: Path) -> None:
    marble("compare", out, "--table-only")
    with Image.open(out / "compare.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 500
    colours = {tuple(colour) for colour in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}
    assert tuple(bytes.fromhex(LIGHT["ours"][1:])) in colours, "MARBLE's interval"
    assert tuple(bytes.fromhex(LIGHT["bad"][1:])) in colours, "that of what it is compared with"
    result("base", 0, {"a": [0.0], "b": [0.0]}, held_out=["b"]).write(out / "jobs" / "base-seed0.json")
    marble("compare", out, "--table-only")
    with Image.open(out / "compare.png") as picture:
        assert picture.size != pixels.shape[1::-1], "with a third method: the composite, and z-scores"


def test_no_table_of_nothing(out: Path, tmp_path: Path) -> None:
    assert "no results of jobs" in marble("compare", tmp_path / "jobs", "--table-only").err
    for file in (out / "jobs").glob("*-seed?.json"):
        if not file.name.startswith("gdpo"):
            file.unlink()
    outcome = marble("compare", out, "--table-only")
    assert outcome.code == 1
    assert "every job crashed" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "marbel"], "Did you mean 'marble'?"),
        (["--seeds", "x"], "--seeds: 'x'"),
        (["--methods", "marble", "--against", "gdpo"], "--against: 'gdpo' is not compared. There are: marble"),
        (["--set", "trainer.stepz=3"], "unknown key 'stepz'"),
        (["--methods", "x=loss.betta=3"], "unknown key 'betta'"),
    ],
)
def test_bad_input_is_found_before_anything_runs(config: Path, arguments: list[str], says: str) -> None:
    outcome = marble("compare", config, "--out", config.parent / "out", *arguments)
    assert outcome.code == 2
    assert says in outcome.err
    assert not list((config.parent / "out").rglob("run"))


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    outcome = marble("compare", tmp_path)
    assert outcome.code == 2
    assert "--table-only" in outcome.err


def test_a_folder_that_is_not_there_is_not_another_one(tmp_path: Path) -> None:
    outcome = marble("compare", tmp_path / "comparee", "--table-only")
    assert outcome.code == 2
    assert "comparee: there is no such folder" in outcome.err


def test_nothing_is_thrown_away_for_a_command_that_is_refused(config: Path) -> None:
    done = finish(plan(config)[0])
    arguments = [
        "--methods",
        "weighted_sum",
        "--seeds",
        "0",
        "--set",
        "trainer.steps=9",
        "--fresh",
        "--against",
        "bass",
    ]
    outcome = marble("compare", config, "--out", config.parent / "out", *arguments)
    assert outcome.code == 2
    assert list(read_results(config.parent / "out").values()) == [done]


def test_a_full_disk_lets_the_other_jobs_save(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Begun:
        def __init__(self, job: Job, lock: int) -> None:
            if done:
                raise StorageFailed("cannot write")
            self.job = job
            done.append("began")

        def __getattr__(self, name: str) -> Any:
            return lambda: done.append(name)

    monkeypatch.setattr(runner, "JobProcess", Begun)
    display = JobsDisplay(Console(file=io.StringIO()), total=4, done=0)
    with pytest.raises(StorageFailed), Interrupts(print) as interrupts:
        runner.run_jobs(plan(config), 2, display, interrupts, 0)
    assert done == ["began", "stop", "wait", "kill"]


def test_help_has_an_example() -> None:
    outcome = marble("compare", "--help")
    assert outcome.code == 0
    assert "Example: marble compare" in " ".join(outcome.out.split())


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_follows_the_jobs(config: Path, terminal: bool) -> None:
    output = io.StringIO()
    good, bad, stopped, _ = plan(config)
    crash = Failure("train", 3, ["stopped: it fell over", ""])
    with JobsDisplay(Console(file=output, force_terminal=terminal, width=150), total=4, done=1) as display:
        for job in (good, bad, stopped):
            display.began(job)
            display.progress(job, "train", 5)
        display.progress(good, "evaluate", 8)
        display.ended(good, finish(good))
        display.ended(bad, finish(bad, failed=crash))
        display.ended(stopped, None)
    shown = output.getvalue()
    assert "failed  marble-seed0 (train, exit code 3): stopped: it fell over" in shown
    assert "stopped weighted_sum-seed1" in shown
    assert ("all jobs" in shown) is terminal
    assert ("done    weighted_sum-seed0" in shown) is not terminal
