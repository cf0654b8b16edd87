"""stdout and stderr that never stop a command.

A reader may go away (`marble train ... | head -1`), a terminal may be closed, the disk under a redirected file may be
full. The training behind the output goes on, and its train.log. What cannot be written is dropped.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Nobody reads any more: the pipe or the terminal is closed. Not worth a word."""


class _Output(io.FileIO):
    """A file descriptor that becomes /dev/null at the first write that fails, for C code and child processes too.

    It is not buffered: a signal handler may print while a line is being printed, which a buffer would refuse.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data)
        while left:  # a pipe may take a part only
            try:
                left = left[super().write(left) or 0 :]
            except OSError as error:
                self.error = error
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
        return len(data)


class _Stream(io.TextIOWrapper):
    def close(self) -> None:
        """A reward may close stdout; that is no reason to fail when its run has something to say."""
        self.flush()


@contextmanager
def unbreakable_output() -> Iterator[list[_Output]]:
    """While the context is open, writes to stdout and stderr do not fail; their errors are in the value. Streams that
    are not this process's own, such as those of a test, are left alone."""
    for descriptor in range(3):  # closed by the caller (`2>&-`): the next file that is opened would get its number
        with suppress(OSError):
            os.fstat(descriptor)
            continue
        os.open(os.devnull, os.O_RDWR)
    outputs: list[_Output] = []
    before = sys.stdout, sys.stderr
    try:
        if sys.stdout is not None and sys.stdout is sys.__stdout__:
            sys.stdout = _replaced(sys.stdout, outputs)
        if sys.stderr is not None and sys.stderr is sys.__stderr__:
            sys.stderr = _replaced(sys.stderr, outputs)
        yield outputs
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _replaced(stream: Any, outputs: list[_Output]) -> _Stream:
    output = _Output(stream.fileno())
    outputs.append(output)
    stream.flush()
    return _Stream(output, stream.encoding, stream.errors, line_buffering=True, write_through=True)


def lost_output(outputs: list[_Output]) -> str | None:
    """Why stdout is incomplete, if somebody may be waiting for it: a script that reads the file must not believe it."""
    errors = [output.error for output in outputs if output.fileno() == 1]
    return next((f"stdout: {e.strerror}; the output is incomplete" for e in errors if e and e.errno not in GONE), None)
