"""Checkpoints: saved and loaded, damaged ones skipped by name, old ones deleted, and a kill at any moment."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from marble_rl import __version__
from marble_rl.errors import InputError, NonFinite, StorageFailed
from marble_rl.runs.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_steps,
    load_checkpoint,
    load_newest,
    restoring,
    save_checkpoint,
    version_of,
)
from marble_rl.storage import file_digest


def checkpoint(step: int, text: str = "") -> Checkpoint:
    adapters = {f"{name}/a": torch.full((3,), step + i / 4) for i, name in enumerate(("default", "old", "ema"))}
    return Checkpoint(step, adapters, {"a/exp_avg": torch.arange(2.0)}, {"alpha": [0.1, 0.9], "text": text})


def newest(folder: Path) -> Checkpoint:
    loaded = load_newest(folder, pytest.fail)
    assert loaded is not None
    return loaded


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Saving and loading


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(7, "é"), keep=2)
    assert path == tmp_path / "step-7"
    for loaded in (load_checkpoint(path), newest(tmp_path)):
        assert (loaded.step, loaded.made_by) == (7, __version__)
        assert loaded.state == {"alpha": [0.1, 0.9], "text": "é"}
        assert torch.equal(loaded.adapter("old")["a"], torch.full((3,), 7.25))
        assert torch.equal(loaded.optimizer["a/exp_avg"], torch.arange(2.0))


def test_the_newest_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "missing", pytest.fail) is None
    assert load_newest(tmp_path, pytest.fail) is None
    for step in (9, 10, 8):
        save_checkpoint(tmp_path, checkpoint(step), keep=3)
    assert checkpoint_steps(tmp_path) == [8, 9, 10]
    assert newest(tmp_path).step == 10


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, checkpoint(step), keep=keep)
    assert names(tmp_path) == [f"step-{step}" for step in left]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        save_checkpoint(tmp_path, checkpoint(3, text), keep=2)
    assert newest(tmp_path).state["text"] == "new"
    assert names(tmp_path) == ["step-3"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageFailed, match=r"cannot write checkpoint .*step-1: .*continue with --resume"):
        save_checkpoint(tmp_path / "file", checkpoint(1), keep=2)


# Damage


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (lambda path: flip_a_bit(path / "adapters.safetensors"), "adapters.safetensors does not match"),
    "a file cut short": (lambda path: os.truncate(path / "optimizer.safetensors", 9), "optimizer.safetensors does not"),
    "other state": (lambda path: (path / "state.json").write_text("{}"), "state.json does not match its digest"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "incomplete, manifest.json is missing"),
    "no weights": (
        lambda path: (path / "adapters.safetensors").unlink(),
        "incomplete, adapters.safetensors is missing",
    ),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 20), "not readable"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    make, reason = DAMAGE[damage]
    for step in (2, 4):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    make(tmp_path / "step-4")
    warnings: list[str] = []
    loaded = load_newest(tmp_path, warnings.append)
    assert loaded is not None
    assert loaded.step == 2
    (warning,) = warnings
    assert warning.startswith(f"skipped checkpoint {tmp_path / 'step-4'}: ")
    assert reason in warning
    with pytest.raises(DamagedCheckpoint, match=reason):
        load_checkpoint(tmp_path / "step-4")


def test_if_all_are_damaged_there_is_none(tmp_path: Path) -> None:
    for step in (2, 4):
        (save_checkpoint(tmp_path, checkpoint(step), keep=2) / "manifest.json").unlink()
    warnings: list[str] = []
    assert load_newest(tmp_path, warnings.append) is None
    assert ["step-4" in warnings[0], "step-2" in warnings[1]] == [True, True]


def test_no_pickle_is_ever_read(tmp_path: Path) -> None:
    """A file that would run code when unpickled is only ever a damaged checkpoint."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    path = save_checkpoint(tmp_path, checkpoint(1), keep=2)
    (path / "optimizer.safetensors").write_bytes(pickle.dumps(Bomb()))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["optimizer.safetensors"] = file_digest(path / "optimizer.safetensors")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match="not readable"):
        load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


# Other versions


def test_another_format_is_refused_not_skipped(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint(2), keep=2)
    path = save_checkpoint(tmp_path, checkpoint(4), keep=2)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99, "marble": "9.9"}))
    with pytest.raises(InputError, match=r"step-4: written in format 99 by marble 9\.9; this is marble"):
        load_newest(tmp_path, pytest.fail)
    assert version_of(tmp_path) == "9.9"


def test_state_of_another_version_is_an_input_error(tmp_path: Path) -> None:
    saved = replace(checkpoint(4), made_by="0.1")
    missing = pytest.raises(InputError, match=r"checkpoint of step 4, written by marble 0\.1, has no 'signal'")
    with missing, restoring(saved, tmp_path):
        saved.state["signal"]
    misfit = pytest.raises(InputError, match="by an unknown version of marble, does not fit: 3 rewards")
    with misfit, restoring(replace(saved, made_by=None), tmp_path):
        raise ValueError("3 rewards")
    with pytest.raises(NonFinite), restoring(saved, tmp_path):
        raise NonFinite("passes through")


# A kill at any moment

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove")


def changes_a_file(event: str, arguments: tuple[Any, ...]) -> bool:
    """Of an audit event of Python."""
    return event in CHANGES or (event == "open" and arguments[2] & os.O_ACCMODE != os.O_RDONLY)


def killed_at(operation: int, work: Callable[[], object]) -> bool:
    """Do the work in a forked process that kills itself before its n-th change of a file; whether it came to that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, which the work does not use
        child = os.fork()
    if child == 0:
        remaining = operation

        def die(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal remaining
            if changes_a_file(event, arguments):
                if remaining == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                remaining -= 1

        sys.addaudithook(die)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("step", [4, 6], ids=["the same step again", "the next step"])
def test_a_kill_between_any_two_writes_loses_no_checkpoint(tmp_path: Path, step: int) -> None:
    before, seen, operation = tmp_path / "before", set(), 0
    save_checkpoint(before, checkpoint(4, "before"), keep=2)
    while True:
        folder = shutil.copytree(before, tmp_path / str(operation))
        killed = killed_at(operation, lambda folder=folder: save_checkpoint(folder, checkpoint(step, "new"), keep=2))
        loaded = newest(folder)
        seen.add((loaded.step, loaded.state["text"]))
        assert version_of(folder) == __version__
        if not killed:
            break
        operation += 1
        # The following checkpoints remove what the kill left.
        for later in (8, 10) if operation % 5 == 0 else ():
            save_checkpoint(folder, checkpoint(later), keep=2)
            assert checkpoint_steps(folder) == ([loaded.step, 8] if later == 8 else [8, 10])
            assert not list(folder.glob("*.partial"))
    assert operation >= 8, "the kills missed the writes"
    assert seen == {(4, "before"), (step, "new")}
