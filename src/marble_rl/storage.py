"""Durable files: complete or absent after a crash, and the same bytes for the same content. `Record`: one class for one
file. Reading is safe from whatever lies under a file's name. Imports torch only to write tensors: `marble runs` does
without."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from safetensors import SafetensorError

from marble_rl.errors import InputError, StorageFailed
from marble_rl.section import first_mistake

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 << 28
"""Of a JSON file. A larger one is not read: nothing that marble writes comes near it."""
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


def without_waiting(name: str, flags: int) -> int:
    """An ``opener`` for `open`: does not wait for the other end of a pipe."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


def open_regular(path: Path) -> BinaryIO:
    """Open a file that is neither folder nor device nor pipe."""
    file = open(path, "rb", opener=without_waiting)  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("not a regular file")
    return file


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most ``most`` bytes. Raises OSError or ValueError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size:,} bytes; at most {most:,} are read")
        return file.read(size)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a file, or with the JSON in it, into an `InputError` that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {reason(error)}") from None


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """The content of a JSON file. Raises an `InputError` that names the file, whatever is wrong with it."""
    with reading(path):
        return parse_json(read_regular(path, most))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, as bytes in UTF-8. Raises ValueError only, even if it is nested too deeply."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def reason(error: Exception) -> str:
    """Why a file could not be read, on one line."""
    if isinstance(error, ValidationError):  # lists all mistakes, on as many lines
        return first_mistake(error)
    return getattr(error, "strerror", None) or str(error)


RecordT = TypeVar("RecordT", bound="Record")
Maybe = Annotated[float | None, BeforeValidator(lambda x: None if isinstance(x, float) and not math.isfinite(x) else x)]
"""A number, or None for NaN and infinity, which JSON does not have."""
Text = Annotated[str, BeforeValidator(lambda x: x.encode("utf-8", "replace").decode() if isinstance(x, str) else x)]
"""Text from prompts; half a surrogate pair, which UTF-8 does not have, becomes a question mark."""


class Record(BaseModel):
    """Content of a JSON file that one command writes and others read, with the version of its layout.

    Unknown keys are ignored, so that a file of a later version is read where it has all that this version needs.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, revalidate_instances="always")
    kind: ClassVar[str]
    """What the file is, as messages call it."""
    fix: ClassVar[str]
    """What to do where the file cannot be read."""

    version: int = 1

    @classmethod
    def upgraded(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """A file from before there were versions, in the layout of version 1."""
        return tree

    @classmethod
    def read(cls: type[RecordT], path: Path) -> RecordT:
        try:
            tree = parse_json(read_regular(path))
            if isinstance(tree, dict) and "version" not in tree:
                tree = cls.upgraded(tree)
            return cls.model_validate(tree)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not {cls.kind} that this version reads ({reason(error)}). {cls.fix}") from None

    def write(self, path: Path) -> None:
        write_json(path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def sync_folder(folder: Path) -> None:
    """Sync the folder itself, so that files created or renamed in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """SHA-256 of a regular file."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def save_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors with metadata; equal content gives equal bytes.

    The safetensors library writes metadata keys in an order that differs between processes, so the header (8 bytes of
    length, then JSON padded with spaces) is rebuilt here with sorted keys.
    """
    from safetensors.torch import save

    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())})
    (length,) = struct.unpack("<Q", data[:8])
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(data[8 : 8 + length])}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    write_bytes(path, struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
