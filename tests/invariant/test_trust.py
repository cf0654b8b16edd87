"""Code that came with a run folder is run with `--trust` only; a project's own code needs nothing."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import marble_rl
from runs import base_config, marble

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(marble_rl.__file__).parents[1])}
START = "import sys; del sys.path[0]; from marble_rl.cli import main; main()"
"""As the command `marble` starts: the current folder is not on Python's path."""
MARBLE = [sys.executable, "-c", START]
REWARD = """
from pathlib import Path
Path({mark!r}).touch()

def mine(images, prompts):
    return [0.5] * len(images)
"""
UNTRUSTED = "is code in the run folder"


def command(cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MARBLE, *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def write_reward(file: Path) -> Path:
    """A module that leaves a mark where it is imported."""
    mark = file.with_suffix(".imported")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(REWARD.format(mark=str(mark)))
    return mark


def write_run(folder: Path, reward: str, **sections: object) -> Path:
    """What the folder of a stranger holds at least."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {**base_config(Path("mini")), "rewards": [{"name": "mine", "type": reward}], **sections}
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


@pytest.fixture
def own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of one test are not those of the next, which have the same names."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("my_rewards", "my_rule", "deeper", "run"):
            del sys.modules[name]


PLACES = [
    ("run", "my_rewards", "run", "."),
    ("run/deeper", "deeper.my_rewards", "run", "."),
    ("run", "run.my_rewards", ".", "run"),
    ("run", "my_rewards", "run", "../run"),
    ("run", "my_rewards", "linked", "."),
]


@pytest.mark.usefixtures("own_imports")
@pytest.mark.parametrize(("place", "module", "cwd", "target"), PLACES)
def test_code_in_a_run_folder_is_not_run(
    place: str, module: str, cwd: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = write_reward(tmp_path / place / "my_rewards.py")
    write_run(tmp_path / "run", f"{module}:mine")
    (tmp_path / "linked").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path / cwd)
    for arguments in (("evaluate", target), ("config", "check", target)):
        refused = marble(*arguments)
        assert refused.code == 2, refused.err
        assert UNTRUSTED in refused.err
        assert "--trust" in refused.err
        assert not mark.exists()
    trusted = marble("config", "check", target, "--trust")
    assert trusted.code == 0, trusted.err
    assert mark.exists()


@pytest.mark.usefixtures("own_imports")
def test_no_command_that_opens_a_run_runs_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule is imported while the config is read, so every command would."""
    mark = write_reward(tmp_path / "run" / "my_rule.py")
    run = write_run(tmp_path / "run", "brightness", balance={"type": "my_rule:Rule"})
    write_run(tmp_path / "other", "brightness")
    monkeypatch.chdir(run)
    for arguments in (
        ("evaluate", "."),
        ("sample", ".", "--prompt", "x"),
        ("diagnose", "."),
        ("report", "."),
        ("export", ".", "--out", tmp_path / "lora"),
        ("train", ".", "--resume"),
        ("config", "show", "."),
        ("rewards", "check", "."),
        ("compare", ".", "../other"),
    ):
        outcome = marble(*arguments)
        assert (outcome.code, UNTRUSTED in outcome.err) == (2, True), (arguments, outcome.err)
    assert not mark.exists()


@pytest.mark.full
def test_the_command_itself_runs_no_code_of_a_run(tmp_path: Path) -> None:
    mark = write_reward(tmp_path / "run" / "my_rewards.py")
    write_run(tmp_path / "run", "my_rewards:mine")
    outcome = command(tmp_path / "run", "evaluate", ".")
    assert outcome.returncode == 2, outcome.stderr
    assert UNTRUSTED in outcome.stderr
    assert not mark.exists()
    command(tmp_path / "run", "--trust", "evaluate", ".")  # which then has no checkpoint
    assert mark.exists()


@pytest.mark.full
def test_the_current_folder_is_searched_for_modules_that_a_config_names_only(tmp_path: Path) -> None:
    """Libraries look for many packages that may not be installed; a file of a stranger must not pass for one."""
    marks = [write_reward(tmp_path / f"{name}.py") for name in ("xformers", "flash_attn", "wandb", "sitecustomize")]
    outcome = command(tmp_path, "sample", "mini", "--prompt", "x", "--steps", 1)
    assert outcome.returncode == 0, outcome.stderr
    assert not any(mark.exists() for mark in marks)


@pytest.mark.usefixtures("own_imports")
def test_a_project_needs_no_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config of one's own runs the code that it names, and so does a run below the project's folder."""
    mark = write_reward(tmp_path / "my_rewards.py")
    write_run(tmp_path / "runs" / "first", "my_rewards:mine")
    monkeypatch.chdir(tmp_path)
    checked = marble("config", "check", "runs/first")
    assert checked.code == 0, checked.err
    assert mark.exists()


@pytest.mark.full
def test_init_train_and_evaluate_need_no_trust(tmp_path: Path) -> None:
    assert command(tmp_path, "init", "mini-demo").returncode == 0
    config = tmp_path / "mini-demo.yaml"
    config.write_text(config.read_text().replace("  # - {name: mine,", "  - {name: mine,"))
    small = "rollout={groups: 6, group_size: 2, steps: 1}"
    few = ("--set", "trainer.steps=1", "--set", small, "--set", "evaluation={limit: 1, steps: 1, batch_size: 2}")
    trained = command(tmp_path, "train", config.name, "--out", "runs/first", *few)
    assert trained.returncode == 0, trained.stderr
    evaluated = command(tmp_path, "evaluate", "runs/first")
    assert evaluated.returncode == 0, evaluated.stderr
    resumed = command(tmp_path, "train", "runs/first", "--resume", "--set", "trainer.steps=2")
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.full
@pytest.mark.parametrize(("answer", "runs"), [("y\n", True), ("n\n", False)])
def test_a_terminal_is_asked(answer: str, runs: bool, tmp_path: Path) -> None:
    mark = write_reward(tmp_path / "run" / "my_rewards.py")
    write_run(tmp_path / "run", "my_rewards:mine")
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*MARBLE, "config", "check", "."],
        cwd=tmp_path / "run",
        env=ENVIRONMENT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    os.write(controller, answer.encode())
    said = b""
    while True:
        try:
            said += os.read(controller, 4096)
        except OSError:  # the other side was closed
            break
    os.close(controller)
    assert process.wait() == (0 if runs else 2), said
    assert b"brings code of its own" in said
    assert mark.exists() == runs


@pytest.mark.full
def test_an_interpreter_within_a_run_folder_is_not_its_code(tmp_path: Path) -> None:
    """A project with its environment in it may itself be the run folder."""
    package = tmp_path / "env" / "marble_rl"
    package.parent.mkdir()
    package.symlink_to(Path(marble_rl.__file__).parent, target_is_directory=True)
    write_run(tmp_path, "brightness")
    code = "from marble_rl.cli import main; main(['config', 'check', '.'])"
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
