"""Run folders with broken, huge or strange files: skipped with a notice, or exit code 2 with one line. Never a
traceback, and never a command that waits for ever."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runs import marble


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "runs" / "run"))


def freed(path: Path) -> Path:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


STRANGE: dict[str, Callable[[Path], object]] = {
    "a list": lambda path: path.write_text("[1, 2]"),
    "nested": lambda path: path.write_text('{"a":' * 20_000),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "huge": huge,
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link that is too long": lambda path: path.symlink_to("x" * 3000),
}


def refused(*arguments: object) -> str:
    """The one line that a command ends with, and exit code 2; before it a run may say where it continues."""
    outcome = marble(*arguments)
    assert outcome.code == 2, outcome.err
    *before, line = outcome.err.splitlines()
    assert before in ([], ["continuing after step 8"])
    return line


@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_config_is_refused(run: Path, config_file: Path, what: str) -> None:
    STRANGE[what](freed(run / "config.json"))
    for command in (("export", run, "--out", run.parent / "out"), ("report", run)):
        assert str(run) in refused(*command)
    assert f"not readable: {run}: its config.json is damaged" in marble("runs", run.parent).err
    assert str(run) in refused("train", config_file, "--out", run, "--resume")


@pytest.mark.parametrize("what", sorted(STRANGE.keys() - {"a folder"}))
def test_a_strange_folder_of_checkpoints_is_refused(run: Path, config_file: Path, what: str) -> None:
    STRANGE[what](freed(run / "checkpoints"))
    for command in (("export", run, "--out", run.parent / "out"), ("train", config_file, "--out", run, "--resume")):
        assert str(run / "checkpoints") in refused(*command)
    assert str(run / "checkpoints") in marble("runs", run.parent).err


@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_history_is_refused_by_a_run_that_goes_on(run: Path, config_file: Path, what: str) -> None:
    STRANGE[what](freed(run / "history.json"))
    assert str(run / "history.json") in refused("train", config_file, "--out", run, "--resume")


@pytest.mark.parametrize("content", ['{"starts": []}', '{"starts": [{"step": "x"}]}', '{"starts": {"a": 1}}'])
def test_a_history_of_wrong_types_is_left_out_of_a_page(run: Path, content: str) -> None:
    (run / "history.json").write_text(content)
    assert marble("report", run).code == 0
    assert "is not a history of a run that this version reads" in (run / "report.html").read_text()


@pytest.mark.parametrize("what", ["bytes", "a pipe", "a link to itself", "a device"])
def test_a_page_is_made_of_what_can_be_read(run: Path, what: str) -> None:
    (run / "evaluation").mkdir()
    for name in ("metrics.jsonl", "history.json", "evaluation/scores.json", ".lock", "samples/step-0.png", "train.log"):
        STRANGE[what](freed(run / name))
    outcome = marble("report", run)
    assert outcome.code == 0, outcome.err
    page = (run / "report.html").read_text()
    assert "metrics.jsonl" in page
    assert "step-0.png could not be shown" in page
    assert marble("runs", run.parent).code == 0


def test_lines_that_are_not_utf_8_are_damaged_lines(run: Path) -> None:
    log = run / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + b'{"step": 1, "reward/small\xff": 1}\n' + b"".join(lines[2:]))
    assert "8/8" in marble("runs", run.parent).out
    assert marble("report", run).code == 0
    assert "Left out, since not readable: 1 of 8 lines of metrics.jsonl." in (run / "report.html").read_text()


def test_a_damaged_newest_checkpoint_is_not_called_saved(run: Path) -> None:
    (run / "checkpoints" / "step-8" / "manifest.json").unlink()
    (run / "checkpoints" / "step-99999999999999999999999").mkdir()
    assert '"saved": 6' in marble("runs", run.parent, "--json").out


@pytest.mark.parametrize("name", ["x" * 5000, "y/" * 2500, "loop/run"], ids=["long", "deep", "loop"])
def test_paths_that_no_file_can_have_are_one_line(config_file: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    commands: list[tuple[object, ...]] = [
        ("runs", path),
        ("report", path),
        ("export", path, "--out", tmp_path / "out"),
        ("evaluate", path),
        ("sample", path, "--prompt", "a cup", "--out", tmp_path / "out"),
        ("diagnose", path),
        ("train", path),
        ("train", config_file, "--out", path, "--resume"),
        ("train", config_file, "--set", f"model.path={path}"),
    ]
    for command in commands:
        refused(*command)


def test_a_nul_in_a_path_is_one_line(config_file: Path, tmp_path: Path) -> None:
    assert "null byte" in refused("evaluate", f"{tmp_path}/a\0b")
    assert "null byte" in refused("sample", f"{tmp_path}/a\0b", "--prompt", "a cup", "--out", tmp_path / "out")
