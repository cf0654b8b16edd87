"""train.log: everything that a run says, with the time, and the tracebacks that the terminal leaves out.

The parts of a run speak through the standard library's logger `marble_rl`. While a run is open, its messages go to the
console and to the log file of its folder. Rank 0 writes train.log; other ranks write train.rankN.log, and only warnings
and errors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console

from marble_rl.distributed.world import World
from marble_rl.errors import InputError, Interrupted
from marble_rl.storage import without_waiting

LOG = logging.getLogger("marble_rl")
STEPS = logging.getLogger("marble_rl.steps")
"""One line for every few steps. On a terminal the progress bar takes its place."""


def log_path(folder: Path, rank: int) -> Path:
    return folder / ("train.log" if rank == 0 else f"train.rank{rank}.log")


@contextmanager
def logging_to(folder: Path, world: World, console: Console) -> Iterator[None]:
    """Show messages on the console and append them to the log file. An exception that ends the block is written to
    the file with its traceback, and remembers where (``log_file``)."""
    path = log_path(folder, world.rank)
    file = _LogFile(path, encoding="utf-8", errors="replace", delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    handlers = [file, _ConsoleHandler(console if world.first else Console(stderr=True), world)]
    for handler in handlers:
        handler.setLevel(logging.INFO if world.first else logging.WARNING)
    level = LOG.level
    LOG.setLevel(logging.INFO)
    for handler in handlers:
        LOG.addHandler(handler)
    try:
        yield
    except Interrupted as stop:
        _write_only_to(file, str(stop), None)
        raise
    except Exception as error:
        if isinstance(error, InputError):
            if world.first:
                _write_only_to(file, str(error), error)
            raise  # it ends a run that does not begin, whose folder may be removed
        _write_only_to(file, f"{type(error).__name__}: {error}", error)
        vars(error)["log_file"] = path
        raise
    finally:
        for handler in handlers:
            LOG.removeHandler(handler)
        LOG.setLevel(level)
        file.close()


def _write_only_to(file: logging.FileHandler, message: str, error: BaseException | None) -> None:
    """The command line prints the error itself."""
    trace = (type(error), error, error.__traceback__) if error is not None else None
    file.handle(LOG.makeRecord(LOG.name, logging.ERROR, "", 0, message, (), trace))


class _LogFile(logging.FileHandler):
    """A file that cannot be written (a full disk, a machine without the run's folder) must not end the run."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=without_waiting)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # from opening the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        return None


class _ConsoleHandler(logging.Handler):
    """Prints above the progress bar; for ranks other than 0 with the rank."""

    def __init__(self, console: Console, world: World) -> None:
        super().__init__()
        self._console = console
        self._prefix = "" if world.first else f"rank {world.rank}: "

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == STEPS.name and self._console.is_terminal:
            return
        self._console.print(self._prefix + record.getMessage(), markup=False, highlight=False, soft_wrap=True)
