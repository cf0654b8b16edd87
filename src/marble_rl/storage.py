"""Durable files: whole or not there at all, the same bytes for the same content."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from marble_rl.errors import StorageFailed


@contextmanager
def storage_errors(what: str, then: str = "continue with --resume") -> Iterator[None]:
    """Turn a refused write into a clean stop that says what could not be written, and what to do ``then``."""
    try:
        yield
    except OSError as error:
        fix = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Mend that"
        raise StorageFailed(f"cannot write {what}: {error.strerror or error}. {fix} and {then}") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write through a temporary name and make it durable: after a crash the file is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object) -> None:
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make names created in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors with metadata; equal content gives equal bytes.

    The library writes metadata keys in an order that changes from process to process, so the header (8 bytes of
    length, then JSON padded with spaces) is rebuilt here with sorted keys.
    """
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())})
    (length,) = struct.unpack("<Q", data[:8])
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(data[8 : 8 + length])}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    write_bytes(path, struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
