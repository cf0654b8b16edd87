"""The command line. Each command imports the heavy packages that it needs, so that `--help` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from marble_rl.cli.output import lost_output, unbreakable_output
from marble_rl.distributed.interrupts import STOPPED, Stopping
from marble_rl.distributed.world import is_first, leave
from marble_rl.errors import Interrupted, Stopped

MESSAGES = {"train": "stopped before the first step; nothing to save"}
"""What a command says that a signal stops before it does anything worth saving; others say `stopped`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of this process. Exit codes are those of errors.py."""
    # Without it MKL rounds by where in memory a matrix lies, on some processors: a resumed run would have other last
    # digits than an uninterrupted one. MKL reads it when it is first used.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    given = sys.argv[1:] if arguments is None else arguments
    command = next((argument for argument in given if not argument.startswith("-")), "")
    message = MESSAGES.get(command, STOPPED) if is_first() else ""
    with unbreakable_output() as outputs, Stopping(message) as stopping:
        try:
            from marble_rl.cli.execution import execute  # it takes a moment, in which a signal may come

            code = execute(given, stopping)
            if arguments is None:
                stopping.end()
        except Stopped as stop:
            stopping.caught()
            if stopping.message:
                print(stopping.message, file=sys.stderr)
            leave(Interrupted(stop.signum, message))
            code = 128 + stop.signum
        lost = lost_output(outputs)
        if lost is not None:
            print(f"error: {lost}", file=sys.stderr)
            code = code or 1
    sys.exit(code)
