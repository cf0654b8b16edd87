"""Kill a command, or let its disk fail, at the n-th operation on the files of a folder.

An operation is opening a file for writing, fsync, rename, link, unlink, mkdir or rmdir (so also each step of
`shutil.rmtree`), in or on the folder. Python's audit events tell of all of them but fsync, which is wrapped. Writes
between them are not operations: what a file holds before it is synced is undefined anyway. Processes that a command
starts itself (jobs of `marble compare`) are not counted.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = {"os.rename": 2, "os.mkdir": 2, "os.rmdir": 1, "os.remove": 1, "os.link": 2, "os.symlink": 2}
"""Of Python's audit events, those that change files: the first argument is a path, and which one is the folder that the
path is relative to (a descriptor; -1: none). `open` is apart."""


class Operations:
    """Counts the operations on the files of a folder in a forked process, and acts at one of them."""

    def __init__(self, folder: Path, at: int | None = None, errno: int | None = None, once: bool = True) -> None:
        """``at``: the operation, counted from 0, that is not done. It raises ``errno``; None: the process is killed.
        ``once``: the operations after it succeed."""
        self._folder, self._at, self._errno, self._once = os.path.realpath(folder), at, errno, once
        self._shared = mmap.mmap(-1, 8)  # with the fork, so that it survives a kill

    @property
    def begun(self) -> int:
        """How many there were."""
        (count,) = struct.unpack("q", self._shared)
        return int(count)

    def watch(self) -> None:
        """In the forked process: begin to count."""
        sys.addaudithook(self._on_event)
        os.fsync = functools.partial(self._fsync, os.fsync)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & os.O_ACCMODE != os.O_RDONLY and not isinstance(path, int):
                self._count(os.fsdecode(path))
        elif event in EVENTS:
            path, folder = os.fsdecode(arguments[0]), arguments[EVENTS[event]]
            self._count(path if folder < 0 else os.path.join(_path_of(folder), path))

    def _fsync(self, fsync: Callable[[int], None], file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        self._count(_path_of(descriptor))
        fsync(descriptor)

    def _count(self, path: str) -> None:
        """Before an operation on the path."""
        place = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
        if not f"{place}/".startswith(f"{self._folder}/"):
            return
        number = self.begun
        self._shared[:] = struct.pack("q", number + 1)
        if self._at is None or number < self._at or (number > self._at and self._once):
            return
        if self._errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(self._errno, os.strerror(self._errno), path)


def _path_of(descriptor: int) -> str:
    """Where an open file lies (Linux)."""
    return os.readlink(f"/proc/self/fd/{descriptor}")
