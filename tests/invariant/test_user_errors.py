"""An error in the user's own code is shown where it is; the rest of the traceback is in the log, or with --debug."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from marble_rl.training.update import Updater
from runs import marble, train, write_config

REWARD = """
def lookup(image):
    table = {"key": 1.0}
    return table["nokey"]


def broken(images, prompts):
    return [lookup(image) for image in images]


class Unloadable:
    def applies_to(self, prompt):
        return True

    def load(self, device):
        raise FileNotFoundError("weights.bin")

    def score(self, batch):
        return [0.0] * len(batch.prompts)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "own_reward_with_errors.py"
    file.write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return file


def config(tiny_sd3: Path, tmp_path: Path, name: str) -> Path:
    reward = {"name": "mine", "type": f"own_reward_with_errors:{name}", "retries": 0}
    return write_config(tmp_path / "c.yaml", tiny_sd3, rewards=[reward])


def test_a_rewards_error_names_its_lines(tiny_sd3: Path, tmp_path: Path, own: Path) -> None:
    run = tmp_path / "run"
    outcome = marble("train", config(tiny_sd3, tmp_path, "broken"), "--out", run)
    assert outcome.code == 3
    assert "KeyError: 'nokey'" in outcome.err
    assert f'{own}:4 in lookup: return table["nokey"]' in outcome.err
    assert f"{own}:8 in broken:" in outcome.err
    assert "calls.py" not in outcome.err
    assert f"{run / 'train.log'}, or --debug" in outcome.err
    log = (run / "train.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "rewards/core/calls.py" in log
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", log)


def test_debug_shows_everything(tiny_sd3: Path, tmp_path: Path, own: Path) -> None:
    for place in (0, 4):
        arguments = ["train", str(config(tiny_sd3, tmp_path, "broken")), "--out", str(tmp_path / f"run-{place}")]
        arguments.insert(place, "--debug")
        outcome = marble(*arguments)
        assert outcome.code == 3
        assert "Traceback (most recent call last)" in outcome.err
        assert "calls.py" in outcome.err


def test_a_reward_that_does_not_load(tiny_sd3: Path, tmp_path: Path, own: Path) -> None:
    outcome = marble("train", config(tiny_sd3, tmp_path, "Unloadable"), "--out", tmp_path / "run")
    assert outcome.code == 2
    assert f"{own}:16 in load:" in outcome.err
    assert "--debug" in outcome.err
    assert not (tmp_path / "run").exists()


def test_an_error_that_nobody_foresaw(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and the traceback in the log; the run continues from its last checkpoint."""
    run = tmp_path / "run"
    train(config_file, run, "--set", "trainer.steps=3")
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "apply", lambda *arguments: {}["a bug"])
        outcome = marble("train", config_file, "--out", run, "--resume")
    assert outcome.code == 70
    assert "internal error: KeyError: 'a bug'" in outcome.err
    assert f"The traceback is in {run / 'train.log'}" in outcome.err
    assert "Traceback" not in outcome.err
    assert "test_user_errors.py" in (run / "train.log").read_text()
    train(config_file, run, "--resume")


def test_an_error_that_nobody_foresaw_without_a_run(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line; the traceback is in a file of its own, or printed with --debug."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("marble_rl.runs.inputs.check_inputs", lambda config: {}["a bug " + "x" * 100_000])
    outcome = marble("config", "check", config_file)
    assert outcome.code == 70
    (line,) = outcome.err.splitlines()
    (log,) = (tmp_path / "temporary").iterdir()
    assert line.startswith("internal error: KeyError: 'a bug xxx")
    assert f"The traceback is in {log}." in line
    assert len(line) < 1000
    assert "test_user_errors.py" in log.read_text()
    outcome = marble("config", "check", config_file, "--debug")
    assert "Traceback (most recent call last)" in outcome.err
    assert list((tmp_path / "temporary").iterdir()) == [log]
