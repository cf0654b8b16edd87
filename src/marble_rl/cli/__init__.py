"""The command line. Each command imports the heavy packages that it needs, so that `--help` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from marble_rl.cli.app import app
from marble_rl.cli.failures import UNFORESEEN, print_failure, print_traceback, print_unforeseen, unusable_path
from marble_rl.distributed.interrupts import told_apart
from marble_rl.distributed.world import is_first, leave
from marble_rl.errors import InputError, MarbleError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of this process. Exit codes are those of errors.py."""
    sys.path.append(os.getcwd())  # rewards named by import path may lie in the current folder
    try:
        with told_apart():
            app(args=_debug_first(sys.argv[1:] if arguments is None else arguments))
    except SystemExit:
        leave()
        raise
    except MarbleError as error:
        if is_first() or not error.shared:
            print_failure(error)
        else:
            print_traceback(error)  # rank 0 prints the message, but knows only its own traceback
        leave(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if (mistake := unusable_path(error)) is not None:
            print_failure(InputError(mistake))
            sys.exit(InputError.exit_code)
        print_unforeseen(error)
        sys.exit(UNFORESEEN)


def _debug_first(arguments: Sequence[str]) -> list[str]:
    """`--debug` belongs to no command, so it goes before the command's name, wherever the user put it."""
    return sorted(arguments, key=lambda argument: argument != "--debug")
