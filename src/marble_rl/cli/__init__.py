"""The command line. Each command imports the heavy packages that it needs, so that `--help` is instant."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from marble_rl.cli.app import app
from marble_rl.cli.failures import UNFORESEEN, print_failure, print_traceback, print_unforeseen
from marble_rl.distributed.world import is_first, leave
from marble_rl.errors import MarbleError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of this process. Exit codes are those of errors.py."""
    try:
        app(args=_general_first(sys.argv[1:] if arguments is None else arguments))
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
    except Exception as error:
        print_unforeseen(error)
        sys.exit(UNFORESEEN)


def _general_first(arguments: Sequence[str]) -> list[str]:
    """`--debug` and `--trust` belong to no command, so they go before the command's name, wherever the user put
    them."""
    return sorted(arguments, key=lambda argument: argument not in ("--debug", "--trust"))
