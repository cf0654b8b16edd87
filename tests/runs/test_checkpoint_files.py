"""Checkpoints: round trip, retention, leftovers of a crash, no pickle."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from marble_rl.runs import checkpoint as checkpoint_module
from marble_rl.runs.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_steps,
    load_checkpoint,
    load_newest,
    save_checkpoint,
    version_of,
)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(step, {"default/a": torch.full((3,), float(step))}, {"a/exp_avg": torch.ones(2)}, {"x": [0.1]})


def test_checkpoint_round_trip_and_retention(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert checkpoint_steps(tmp_path) == [4, 10]
    loaded = load_newest(tmp_path, pytest.fail)
    assert loaded is not None
    assert loaded.step == 10
    assert torch.equal(loaded.adapter("default")["a"], torch.full((3,), 10.0))
    assert loaded.state == {"x": [0.1]}
    assert load_newest(tmp_path / "nowhere", pytest.fail) is None


def test_leftovers_of_a_crash_are_ignored_and_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-7.partial").mkdir(parents=True)
    (tmp_path / ".step-7.partial" / "adapters.safetensors").write_bytes(b"half")
    assert load_newest(tmp_path, pytest.fail) is None
    save_checkpoint(tmp_path, checkpoint(8), keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-8"]


class Killed(BaseException):
    """Nothing in the package catches it."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_checkpoint_is_never_lost_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Killed before the first rename, between the two, and before anything is deleted."""
    save_checkpoint(tmp_path, checkpoint(3), keep=2)
    rename, sync_folder, done = Path.rename, checkpoint_module.sync_folder, []

    def rename_or_die(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise Killed
        done.append(target)
        return rename(path, target)

    def sync_or_die(folder: Path) -> None:
        if len(done) == 2:
            raise Killed
        sync_folder(folder)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename_or_die)
        patched.setattr(checkpoint_module, "sync_folder", sync_or_die)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, replace(checkpoint(3), state={"x": "new"}), keep=2)

    found = load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert (found.step, found.state) == (3, {"x": "new"} if renames == 2 else {"x": [0.1]})
    assert checkpoint_steps(tmp_path) == [3]
    assert version_of(tmp_path) == found.made_by == load_checkpoint(tmp_path / "step-3").made_by
    save_checkpoint(tmp_path, checkpoint(4), keep=2)
    assert checkpoint_steps(tmp_path) == [3, 4]
    save_checkpoint(tmp_path, checkpoint(3), keep=2)
    save_checkpoint(tmp_path, checkpoint(5), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


def test_no_pickle_is_ever_read(tmp_path: Path) -> None:
    """A file that would run code when unpickled is only ever a damaged checkpoint."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    path = save_checkpoint(tmp_path, checkpoint(1), keep=2)
    data = pickle.dumps(Bomb())
    (path / "optimizer.safetensors").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    from marble_rl.storage import file_digest

    manifest["sha256"]["optimizer.safetensors"] = file_digest(path / "optimizer.safetensors")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()
