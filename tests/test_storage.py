"""Files are written whole or not at all, with the same bytes for the same content."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from marble_rl.errors import InputError, StorageFailed
from marble_rl.storage import Record, read_json, save_safetensors, storage_errors, write_bytes


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(1, dtype=torch.bfloat16)}
    metadata = {f"key {i}": str(i) for i in range(9)}
    save_safetensors(tmp_path / "1", tensors, metadata)
    save_safetensors(tmp_path / "2", dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    with safe_open(tmp_path / "1", "pt") as file:
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("b"), tensors["b"])
        assert file.get_tensor("a").dtype == torch.bfloat16


def test_a_refused_write_leaves_the_old_file(tmp_path: Path) -> None:
    import resource

    target = tmp_path / "file"
    write_bytes(target, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(StorageFailed, match="the file"), storage_errors("the file"):
            write_bytes(target, b"x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file or directory"),
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "symbolic links"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "huge": (lambda path: (path.touch(), os.truncate(path, 1 << 40)), "it has 1,099,511,627,776 bytes"),
    "not UTF-8": (lambda path: path.write_bytes(b'{"a": "\xff"}'), "invalid start byte"),
    "nested": (lambda path: path.write_text("[" * 50_000), "nested too deeply"),
    "cut short": (lambda path: path.write_text('{"a": '), "Expecting value"),
}


class Note(Record):
    kind: ClassVar[str] = "a note"
    fix: ClassVar[str] = "Write another"

    text: str


@pytest.mark.parametrize("what", STRANGE)
def test_whatever_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path: Path, what: str) -> None:
    make, why = STRANGE[what]
    make(tmp_path / "note.json")
    for read in (read_json, Note.read):
        with pytest.raises(InputError, match=rf"{tmp_path / 'note.json'}.*{why}") as refused:
            read(tmp_path / "note.json")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "a\ud800"], ids=["long", "NUL", "half a surrogate pair"])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    with pytest.raises(InputError, match=r"cannot read "):
        read_json(Path(name))


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.EACCES, "Fix that")],
)
def test_a_refused_write_names_what_helps(number: int, fix: str) -> None:
    reason = os.strerror(number)
    with pytest.raises(StorageFailed) as failed, storage_errors("the file", "draw again"):
        raise OSError(number, reason, "/somewhere")
    assert str(failed.value) == f"cannot write the file: {reason}. {fix} and draw again"
