"""`marble compare` with real trainings: stopped, killed, with a method that crashes, and then gone on with."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from runs import lora_bytes, marble, metrics, start, train, write_config

pytestmark = pytest.mark.full
STEPS = 12
JOBS = ["marble-seed0", "marble-seed1", "weighted_sum-seed0", "weighted_sum-seed1"]


def wait_for_step(process: subprocess.Popen[str], out: Path) -> None:
    """Until a job under way has logged a step beyond what it had before."""
    before = {file: file.read_bytes() for file in out.glob("jobs/*/run/metrics.jsonl")}
    while process.poll() is None:
        files = {file: file.read_bytes() for file in out.glob("jobs/*/run/metrics.jsonl")}
        if any(b"\n" in content and content != before.get(file) for file, content in files.items()):
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate()[0])


def wait_for_lock(out: Path) -> None:
    """Until the jobs of a comparison that was killed have ended: they hold its lock."""
    end = time.monotonic() + 30
    with open(out / "jobs" / ".lock") as lock:
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.05)
    raise AssertionError("jobs outlive the comparison that started them")


def test_stopped_killed_and_with_a_crash_the_comparison_ends_in_its_table(tiny_sd3: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "config.yaml", tiny_sd3, trainer={"steps": STEPS, "save_every": 1, "micro_batch": 8}, logging={}
    )
    out = tmp_path / "out"
    command = ["compare", config, "--methods", "weighted_sum,marble", "--seeds", "0-1", "--jobs", 2, "--out", out]

    # Ctrl-C: the jobs save and end, the exit code is that of the signal.
    process = start(*command)
    wait_for_step(process, out)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "the same command goes on from here" in output
    assert list(out.glob("jobs/*.json")) == []
    begun = {file.parent: len(metrics(file.parent)) for file in out.glob("jobs/*/run/metrics.jsonl")}
    assert begun
    for run, done in begun.items():
        assert 0 < done < STEPS
        assert (run / "checkpoints" / f"step-{done}" / "manifest.json").exists()

    # kill -9: the job notices that it is alone.
    process = start(*command, "--jobs", 1)
    wait_for_step(process, out)
    process.kill()
    process.communicate()
    wait_for_lock(out)
    run = out / "jobs" / "weighted_sum-seed0" / "run"
    assert begun.get(run, 0) < len(metrics(run)) < STEPS
    assert list(out.glob("jobs/*.json")) == []

    # A method of our own diverges; the others go on.
    outcome = marble(*command, "--seeds", 0, "--methods", "bad=optimizer.lr=1e30,rollout.updates=1")
    assert outcome.code == 1, outcome.err
    assert "1 job crashed: bad seed 0" in outcome.err
    assert sorted(file.stem for file in out.glob("jobs/*.json")) == ["bad-seed0", *JOBS[::2]]
    failed = json.loads((out / "jobs" / "bad-seed0.json").read_text())["failed"]
    assert (failed["stage"], failed["exit_code"]) == ("train", 3)
    assert "not finite" in "\n".join(failed["last_lines"])
    assert "not finite" in (out / "jobs" / "bad-seed0.log").read_text()

    # What was stopped and killed is what an uninterrupted run would have been.
    job = json.loads((out / "jobs" / "marble-seed0.json").read_text())
    whole = ["--set", "trainer.seed=0", "--set", 'balance={"type": "marble", "refresh_every": 10, "ema_decay": 0.7}']
    train(config, tmp_path / "whole", *whole)
    assert lora_bytes(out / "jobs" / "marble-seed0" / "run") == lora_bytes(tmp_path / "whole")
    evaluated = json.loads(marble("evaluate", tmp_path / "whole", "--weights", "ema", "--json").out)
    assert job["means"] == evaluated["weights"]["ema"]["means"]
    assert set(job["training"]) >= {"alpha_bar/small", "heldout/min_cos", "ws_heldout/min_cos"}
    assert job["seconds_per_step"] > 0

    # The second seed, and not the first one again.
    os.unlink(out / "jobs" / "bad-seed0.json")
    files = {file: file.stat().st_mtime_ns for file in out.glob("jobs/*.json")}
    outcome = marble(*command)
    assert outcome.code == 0, outcome.err
    assert "2 done, 2 to run, 2 at a time" in outcome.err
    assert files == {file: file.stat().st_mtime_ns for file in files}
    assert sorted(file.stem for file in out.glob("jobs/*.json")) == JOBS
    outcome = marble("compare", out, "--table-only", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert [(row["method"], row["seeds"]) for row in found["rows"]] == [("weighted_sum", [0, 1]), ("marble", [0, 1])]
    assert found["rows"][1]["differences"].keys() == {"small", "bright", "colour"}
    assert {"table.md", "compare.json", "compare.csv", "compare.png"} <= {file.name for file in out.iterdir()}

    # Another budget does not mix with this one.
    outcome = marble(*command, "--set", "trainer.steps=9")
    assert outcome.code == 2
    assert f"trainer.steps was {STEPS}, now 9" in outcome.err

    # Another evaluation keeps the trainings: every score is what it would have been from the start.
    steps = {run: (run / "metrics.jsonl").read_bytes() for run in out.glob("jobs/*/run")}
    outcome = marble(*command, "--set", "evaluation.steps=3", "--evaluate-again")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("keeping the training of") == len(JOBS)
    assert steps == {run: (run / "metrics.jsonl").read_bytes() for run in steps}
    train(config, tmp_path / "whole", *whole, "--set", "evaluation.steps=3", "--resume")
    evaluated = json.loads(marble("evaluate", tmp_path / "whole", "--weights", "ema", "--json").out)
    now = json.loads((out / "jobs" / "marble-seed0.json").read_text())
    assert now["means"] == evaluated["weights"]["ema"]["means"] != job["means"]
