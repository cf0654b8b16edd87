"""Run marble commands that are killed, or whose disk fails, at the n-th operation on the files of a run.

    command = ["train", "config.yaml", "--out", "runs/one", "--resume-or-start"]
    operations = count_operations(command, Path("runs/whole"))            # how many there are
    run_with_kill(command, Path("runs/one"), at=17)                       # SIGKILL instead of the 18th: -9
    run_with_fault(command, Path("runs/one"), at=17, errno=errno.ENOSPC, once=False)

An operation is opening a file for writing, fsync, rename or replace, unlink, mkdir or rmdir (so also each step of
`shutil.rmtree`), in or on the run's folder. Operations are counted from 0; the one at ``at`` is not done. Python's
audit events tell of all of them but fsync, which is wrapped. Writes between them are not operations: what a file holds
before it is synced is undefined anyway. Processes that a command starts itself (jobs of `marble compare`) are not
counted.

Importing torch and diffusers takes longer than a small training. So one process imports them, and each command runs in
a fork of it (a zygote). It only imports: it has one thread and has computed nothing, so that a fork is as good as new.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]
EVENTS = {"os.rename": 2, "os.mkdir": 2, "os.rmdir": 1, "os.remove": 1, "os.link": 2, "os.symlink": 2}
"""Of Python's audit events, those that change files: the first argument is a path, and which one is the folder that the
path is relative to (a descriptor; -1: none). `open` is apart."""
KILLED = -signal.SIGKILL


class Order(BaseModel):
    """What the zygote runs, as one line of JSON."""

    command: list[str]
    folder: Path
    cwd: Path
    at: int | None = None
    """The operation that is not done; None: all are done."""
    errno: int | None = None
    """The error that it raises; None: the process is killed."""
    once: bool = True
    """Whether the operations after it succeed."""


class Outcome(BaseModel):
    """What became of it, as one line of JSON."""

    code: int
    """The exit code; that of a process killed by signal N is -N."""
    operations: int
    """How many were begun."""
    out: str
    err: str


def count_operations(command: Sequence[str], run_folder: Path) -> int:
    """How many operations on the files of the folder the command makes. It must succeed."""
    outcome = run_order(Order(command=list(command), folder=run_folder, cwd=Path.cwd()))
    assert outcome.code == 0, outcome.err
    return outcome.operations


def run_with_kill(command: Sequence[str], run_folder: Path, at: int) -> int:
    """Run the command up to the operation ``at``; returns its exit code: KILLED, unless it ended before."""
    return run_order(Order(command=list(command), folder=run_folder, cwd=Path.cwd(), at=at)).code


def run_with_fault(
    command: Sequence[str], run_folder: Path, at: int, errno: int, once: bool
) -> subprocess.CompletedProcess[str]:
    """Run the command with a disk that refuses the operation ``at`` with this error, ``once`` or for good."""
    order = Order(command=list(command), folder=run_folder, cwd=Path.cwd(), at=at, errno=errno, once=once)
    outcome = run_order(order)
    return subprocess.CompletedProcess(["marble", *command], outcome.code, outcome.out, outcome.err)


def kill_until_finished(command: Sequence[str], run_folder: Path, seed: int, operations: int) -> int:
    """Start the command again and again, each time killed at a random operation, until it ends by itself; returns the
    number of kills. ``operations``: as many as the uninterrupted command makes. The command must be one that resumes:
    `train ... --resume-or-start`."""
    dice, kills = random.Random(seed), 0
    while (code := run_with_kill(command, run_folder, dice.randrange(operations))) == KILLED:
        kills += 1
    assert code == 0, f"exit code {code} after {kills} kills, seed {seed}"
    return kills


def results_of(run_folder: Path) -> dict[str, bytes]:
    """The files of a run that must not depend on what happened to it: LoRA and checkpoints, by path."""
    folders = (run_folder / "lora", run_folder / "checkpoints")
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(run_folder)): file.read_bytes() for file in sorted(files)}


# The zygote, seen from outside


def run_order(order: Order) -> Outcome:
    """Have it run in a fork, and wait for it."""
    zygote = _zygote()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    zygote.stdin.write(order.model_dump_json() + "\n")
    zygote.stdin.flush()
    answer = zygote.stdout.readline()
    if not answer:
        _zygote.cache_clear()
        raise RuntimeError(f"the process that starts the commands ended with code {zygote.wait()}")
    return Outcome.model_validate_json(answer)


@functools.cache
def _zygote() -> subprocess.Popen[str]:
    """One for this process. It ends with its stdin."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    zygote = subprocess.Popen(
        [sys.executable, "-m", "tools.campaign.kill"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, zygote)
    return zygote


def _end(zygote: subprocess.Popen[str]) -> None:
    with zygote:
        pass  # closes its stdin, and waits


# The zygote, inside


def serve(orders: TextIO, answers: TextIO) -> None:
    """Run one order after the other, each in a fork."""
    for line in orders:
        order = Order.model_validate_json(line)
        assert len(os.listdir("/proc/self/task")) == 1, "threads would be missing in a fork"
        counter = mmap.mmap(-1, 8)  # shared with the fork, so that it survives a kill
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                _run(order, counter, (out, err))
            _, status = os.waitpid(child, 0)
            texts = [_content(file).decode(errors="replace") for file in (out, err)]
        (operations,) = struct.unpack("q", counter)
        outcome = Outcome(code=os.waitstatus_to_exitcode(status), operations=operations, out=texts[0], err=texts[1])
        print(outcome.model_dump_json(), file=answers, flush=True)


def _content(file: BinaryIO | Any) -> bytes:
    file.seek(0)
    return bytes(file.read())


def _run(order: Order, counter: mmap.mmap, outputs: Sequence[Any]) -> NoReturn:
    """In the fork: the command, with counted operations."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, file in zip((1, 2), outputs, strict=True):
            os.dup2(file.fileno(), descriptor)
        os.chdir(order.cwd)
        from marble_rl.cli import main

        count = Operations(order, counter).count
        sys.addaudithook(functools.partial(_on_event, count))
        os.fsync = functools.partial(_fsync, count, os.fsync)
        try:
            main(order.command)
        except SystemExit as end:
            code = int(end.code or 0)
    finally:
        os._exit(code)


class Operations:
    """Counts the operations on the files of a folder, and does what was ordered at one of them."""

    def __init__(self, order: Order, counter: mmap.mmap) -> None:
        self._order = order
        self._counter = counter
        self._folder = os.path.realpath(order.cwd / order.folder)
        self._count = 0

    def count(self, path: str) -> None:
        """Before an operation on the path."""
        place = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
        if not f"{place}/".startswith(f"{self._folder}/"):
            return
        number, self._count = self._count, self._count + 1
        self._counter[:] = struct.pack("q", self._count)
        at, once = self._order.at, self._order.once
        if at is None or number < at or (number > at and once):
            return
        if self._order.errno is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(self._order.errno, os.strerror(self._order.errno), path)


def _on_event(count: Callable[[str], None], event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if flags & os.O_ACCMODE != os.O_RDONLY and not isinstance(path, int):
            count(os.fsdecode(path))
    elif event in EVENTS:
        path, folder = os.fsdecode(arguments[0]), arguments[EVENTS[event]]
        count(path if folder < 0 else os.path.join(_path_of(folder), path))


def _fsync(count: Callable[[str], None], fsync: Callable[[int], None], file: Any) -> None:
    descriptor = file if isinstance(file, int) else file.fileno()
    count(_path_of(descriptor))
    fsync(descriptor)


def _path_of(descriptor: int) -> str:
    """Where an open file lies (Linux)."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    import marble_rl.cli.execution
    import marble_rl.training.trainer  # noqa: F401

    serve(sys.stdin, answers)
