"""A run remembers every start: what was asked, with which packages, and which settings changed on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runs import marble, train


@pytest.fixture
def resumed(finished_run: Path, config_file: Path, tmp_path: Path) -> Path:
    """A run of 8 steps that goes on with another learning rate to step 9."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    train(config_file, run, "--resume", "--set", "trainer.steps=9", "--set", "optimizer.lr=0.002")
    return run


def test_starts_are_kept_with_what_changed(resumed: Path, tmp_path: Path) -> None:
    first, second = json.loads((resumed / "history.json").read_text())["starts"]
    assert (first["step"], first["changes"]) == (0, [])
    assert second["step"] == 8
    changes = {change["key"]: (change["before"], change["after"], change["free"]) for change in second["changes"]}
    assert changes["optimizer.lr"] == (0.01, 0.002, False)
    assert changes["trainer.steps"] == (8, 9, True)
    assert {"marble", "torch", "diffusers", "peft"} <= second["versions"].keys()
    assert second["ranks"] == 1
    assert second["command"]

    outcome = marble("report", resumed, "--out", tmp_path / "report.html")
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "report.html").read_text()
    assert "After step 8, optimizer.lr was 0.01, now 0.002." in page
    assert "Started 2 times" in page

    outcome = marble("export", resumed, "--out", tmp_path / "lora")
    assert outcome.code == 0, outcome.err
    card = (tmp_path / "lora" / "README.md").read_text()
    assert "- After step 8, optimizer.lr was 0.01, now 0.002." in card
    assert "torch " in card


def test_resume_needs_a_run(config_file: Path, tmp_path: Path) -> None:
    """A mistyped --out must not start a whole run; under torchrun and SLURM the same command starts and continues."""
    mistyped = tmp_path / "rum"
    outcome = marble("train", config_file, "--out", mistyped, "--resume")
    assert outcome.code == 2
    assert f"--resume: there is no run in {mistyped}" in outcome.err
    assert "--resume-or-start" in outcome.err
    assert not mistyped.exists()
    for steps in (1, 2):
        train(config_file, tmp_path / "run", "--resume-or-start", "--set", f"trainer.steps={steps}")
    assert len(json.loads((tmp_path / "run" / "history.json").read_text())["starts"]) == 2


@pytest.mark.parametrize("target", ["{}/nope", "./nope", "runs/nope"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    outcome = marble("sample", target.format(tmp_path), "--prompt", "a cup")
    assert outcome.code == 2
    assert "no such folder" in outcome.err
    assert "hf download" not in outcome.err
