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
    load_checkpoint,
    load_newest,
    restoring,
    save_checkpoint,
)
from marble_rl.runs.layout import checkpoint_steps
from marble_rl.runs.manifest import DamagedCheckpoint, version_of
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


# What is kept


def damage(path: Path) -> None:
    os.truncate(path / "adapters.safetensors", 9)


def test_damaged_checkpoints_do_not_count_and_are_kept_under_another_name(tmp_path: Path) -> None:
    """After all were damaged, the steps of a run that begins again are lower than theirs."""
    for step in (6, 8):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    for step in (6, 8):
        damage(tmp_path / f"step-{step}")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
        assert newest(tmp_path).step == step
    assert names(tmp_path) == ["damaged-step-6", "damaged-step-8", "step-2", "step-3"]
    assert (tmp_path / "damaged-step-8" / "optimizer.safetensors").exists()


def test_a_damaged_one_of_the_same_step_does_not_replace_an_earlier_one(tmp_path: Path) -> None:
    for text in ("a", "b", "c"):
        damage(save_checkpoint(tmp_path, checkpoint(4, text), keep=2))
    save_checkpoint(tmp_path, checkpoint(4, "whole"), keep=2)
    assert names(tmp_path) == ["damaged-step-4", "damaged-step-4-2", "damaged-step-4-3", "step-4"]
    kept = [json.loads((tmp_path / name / "state.json").read_text())["text"] for name in names(tmp_path)]
    assert kept == ["a", "b", "c", "whole"]


def test_what_was_written_is_kept_beside_later_steps(tmp_path: Path) -> None:
    for step in (6, 8, 2):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert names(tmp_path) == ["step-2", "step-8"]


def test_damage_that_leaves_size_and_name_is_found_too(tmp_path: Path) -> None:
    for step in (2, 4):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    flip_a_bit(tmp_path / "step-4" / "optimizer.safetensors")
    save_checkpoint(tmp_path, checkpoint(6), keep=2)
    assert names(tmp_path) == ["damaged-step-4", "step-2", "step-6"]


def test_folders_with_other_names_are_left_alone(tmp_path: Path) -> None:
    strange = ["step-99999999999999999999999", "step-007", "step-x", "step-\u0663", "notes"]
    for name in strange:
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert names(tmp_path) == sorted([*strange, "step-2", "step-3"])
    assert newest(tmp_path).step == 3


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
    "another step": (lambda path: edit_manifest(path, step=5), "manifest.json does not match its own checksum"),
    "another format": (lambda path: edit_manifest(path, format=1), "manifest.json does not match its own checksum"),
    "no checksum": (lambda path: edit_manifest(path, checksum=None), "manifest.json does not match its own checksum"),
    "format 1, another step": (lambda path: as_format_1(path, step=5), "is of step 5, in the folder of step 4"),
    "format 1, no digests": (lambda path: as_format_1(path, sha256={}), "does not have the digests of adapters"),
    "format 1, a digest of another file": (
        lambda path: as_format_1(path, sha256={"../../dev/zero": "0" * 64}),
        "does not have the digests of adapters",
    ),
    "format 1, a step of another type": (
        lambda path: as_format_1(path, step=True),
        "step: Input should be a valid int",
    ),
    "format 1, digests of another type": (
        lambda path: as_format_1(path, sha256=[4]),
        "sha256: Input should be a valid",
    ),
    "a format of another type": (lambda path: edit_manifest(path, format="2"), "format: Input should be a valid int"),
    "a manifest that is true": (lambda path: (path / "manifest.json").write_text("true"), "not a JSON object"),
    "a nested manifest": (lambda path: (path / "manifest.json").write_text("[" * 50_000), "nested too deeply"),
    "a huge manifest": (lambda path: os.truncate(path / "manifest.json", 1 << 40), "at most 65,536 are read"),
    "a manifest in Latin-1": (lambda path: (path / "manifest.json").write_bytes(b'{"marble": "\xe9"}'), "not readable"),
    "a manifest that is a folder": (lambda path: replaced(path / "manifest.json").mkdir(), "Is a directory"),
    "a manifest that is a pipe": (lambda path: os.mkfifo(replaced(path / "manifest.json")), "not a regular file"),
    "a link to itself": (lambda path: replaced(path / "manifest.json").symlink_to("manifest.json"), "not readable"),
    "endless weights": (
        lambda path: replaced(path / "adapters.safetensors").symlink_to("/dev/zero"),
        "adapters.safetensors is not readable",
    ),
    "a file for a folder": (lambda path: replaced(path).write_text("gone"), "not readable"),
}


def edit_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def as_format_1(path: Path, **changes: object) -> None:
    """As the first versions wrote it: without a checksum."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("checksum")
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 1, **changes}))


def replaced(path: Path) -> Path:
    """A path that is free for something else."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return path


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
    for path in [save_checkpoint(tmp_path, checkpoint(step), keep=2) for step in (2, 4)]:
        (path / "manifest.json").unlink()
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
    earlier = {key: value for key, value in manifest.items() if key != "checksum"}
    (path / "manifest.json").write_text(json.dumps({**earlier, "format": 1}))
    with pytest.raises(DamagedCheckpoint, match="not readable"):
        load_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


# Other versions


def test_a_checkpoint_without_a_checksum_of_its_manifest_is_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(4), keep=2)
    as_format_1(path, marble="0.2.0")
    assert (newest(tmp_path).step, newest(tmp_path).made_by) == (4, "0.2.0")
    flip_a_bit(path / "state.json")
    with pytest.raises(DamagedCheckpoint, match=r"state\.json does not match its digest"):
        load_checkpoint(path)


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


@pytest.mark.full
def test_a_kill_while_old_checkpoints_are_deleted_leaves_neither_damaged_nor_surplus_ones(tmp_path: Path) -> None:
    before, operation, killed = tmp_path / "before", 0, True
    for step in (2, 4):
        save_checkpoint(before, checkpoint(step), keep=2)
    while killed:
        folder = shutil.copytree(before, tmp_path / str(operation))
        killed = killed_at(operation, lambda folder=folder: save_checkpoint(folder, checkpoint(6), keep=2))
        for step in checkpoint_steps(folder):
            load_checkpoint(folder / f"step-{step}")
        save_checkpoint(folder, checkpoint(8), keep=2)
        assert names(folder) == [f"step-{step}" for step in (6 if (folder / "step-6").exists() else 4, 8)]
        operation += 1
    assert operation >= 12, "the kills missed the deletions"
