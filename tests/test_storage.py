"""Files are written whole or not at all, with the same bytes for the same content."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from marble_rl.errors import StorageFailed
from marble_rl.storage import save_safetensors, storage_errors, write_bytes


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


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "Free some space"), (errno.EDQUOT, "Free some space"), (errno.EACCES, "Fix that")],
)
def test_a_refused_write_names_what_helps(number: int, fix: str) -> None:
    reason = os.strerror(number)
    with pytest.raises(StorageFailed) as failed, storage_errors("the file", "draw again"):
        raise OSError(number, reason, "/somewhere")
    assert str(failed.value) == f"cannot write the file: {reason}. {fix} and draw again"
