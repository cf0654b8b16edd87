"""One attack is one process: a fork of this one, which has imported marble already.

The fork runs the installed entry point, `marble_rl.cli.main`, with its own output, working folder and limits. So an
attack costs what the command costs, without the seconds that importing torch takes.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY = 6 << 30
"""Most bytes of address space that a command may add to those of this process."""
SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """A command that ended, or was killed at its time limit."""

    command: tuple[str, ...]
    code: int
    """Exit code; minus the number of the signal that ended it."""
    text: str
    """What it printed, to both streams."""
    cpu: float
    """Seconds, user and system."""
    megabytes: float
    """Peak memory above that of this process."""
    timed_out: bool


def import_all() -> None:
    """Import what commands import, once, so that forks need not."""
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import marble_rl.cli
    import marble_rl.evaluation.evaluate
    import marble_rl.inference.export
    import marble_rl.report.writing
    import marble_rl.training.trainer  # noqa: F401

    torch.set_num_threads(1)


class Started:
    """A command under way."""

    def __init__(self, command: Sequence[object], folder: Path, prepare: Callable[[], None] = lambda: None) -> None:
        """Run `marble COMMAND` in ``folder``. ``prepare`` is called in the new process first."""
        self.command = tuple(str(word) for word in command)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by `wait`
        assert len(os.listdir("/proc/self/task")) == 1, "threads would be missing in a fork"
        self.process = os.fork()
        if self.process == 0:
            _be_the_command(self.command, folder, self._output.fileno(), prepare)

    @property
    def text(self) -> str:
        """What it has printed."""
        return os.pread(self._output.fileno(), 1 << 26, 0).decode(errors="replace")

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Until it has ended; after ``seconds`` it is killed."""
        start, timed_out = time.monotonic(), False
        while True:
            ended, status, used = os.wait4(self.process, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - start > seconds and not timed_out:
                os.killpg(self.process, signal.SIGKILL)
                timed_out = True
            time.sleep(0.002)
        text = self.text
        self._output.close()
        megabytes = max(0.0, (used.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024)
        code, cpu = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        return Ended(self.command, code, text, cpu, megabytes, timed_out)


def in_fork(action: Callable[[], object]) -> None:
    """Call something that starts threads, which this process must not have."""
    process = os.fork()
    if process == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError("the process for it failed")


def run(command: Sequence[object], folder: Path, seconds: float = SECONDS) -> Ended:
    """Run `marble COMMAND` in ``folder``."""
    return Started(command, folder).wait(seconds)


def _be_the_command(words: tuple[str, ...], folder: Path, output: int, prepare: Callable[[], None]) -> None:
    """In the fork: never returns."""
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((nothing, output, output)):
            os.dup2(source, target)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False, errors="backslashreplace") for n in (1, 2))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        os.chdir(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        prepare()
        from marble_rl.cli import main

        main(words)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                code = code or 1
        os._exit(code)
