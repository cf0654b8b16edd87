"""Durable files: complete or absent after a crash, and the same bytes for the same content."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from marble_rl.errors import InputError, StorageFailed

RESUME = "continue with --resume"
"""What to do once a run can write its files again."""


@contextmanager
def storage_errors(what: str, then: str = RESUME) -> Iterator[None]:
    """Turn a failed write into a `StorageFailed` that names ``what`` could not be written, and what to do ``then``."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = "Free some space" if _is_full(error) else "Fix that"
        raise StorageFailed(f"cannot write {what}: {reason}. {fix} and {then}") from error


def _is_full(error: OSError | SafetensorError) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in full
    return any(os.strerror(number) in str(error) for number in full)  # safetensors quotes the system's message


@contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Check that --out can be written to before the work that fills it. Folders that were created for it are removed
    if they stay empty because the work failed."""
    try:
        created = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror}; give another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):  # stop at the first folder that is not empty
            for folder in created:
                folder.rmdir()


def write_bytes(path: Path, data: bytes) -> None:
    """Write to a temporary name, sync, then rename: after a crash the file is the old one or the new one."""
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
    """Sync the folder itself, so that files created or renamed in it survive a crash."""
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

    The safetensors library writes metadata keys in an order that differs between processes, so the header (8 bytes of
    length, then JSON padded with spaces) is rebuilt here with sorted keys.
    """
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())})
    (length,) = struct.unpack("<Q", data[:8])
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(data[8 : 8 + length])}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    write_bytes(path, struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
