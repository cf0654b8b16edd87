"""One command, from its arguments to its exit code."""

from __future__ import annotations

from collections.abc import Sequence

from marble_rl.cli.app import app
from marble_rl.cli.failures import UNFORESEEN, print_failure, print_traceback, print_unforeseen, unusable_path
from marble_rl.distributed.interrupts import Stopping
from marble_rl.distributed.world import is_first, leave
from marble_rl.errors import InputError, MarbleError, Stopped


def execute(arguments: Sequence[str], stopping: Stopping) -> int:
    """Run the command and print its error, if any; returns its exit code. Raises `Stopped` where a signal ended it."""
    try:
        app(args=_general_first(arguments))
    except SystemExit as end:
        if end.code:
            _raise_stop(end, stopping)
        leave()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except MarbleError as error:
        if is_first() or not error.shared:
            print_failure(error)
        else:
            print_traceback(error)  # rank 0 prints the message, but knows only its own traceback
        leave(error)
        return error.exit_code
    except Stopped:
        raise
    except BaseException as error:  # also what code of users raises in the place of an Exception
        _raise_stop(error, stopping)
        if (mistake := unusable_path(error)) is not None:
            print_failure(InputError(mistake))
            return InputError.exit_code
        print_unforeseen(error)
        return UNFORESEEN
    return 0


def _raise_stop(error: BaseException | None, stopping: Stopping) -> None:
    """Raise the signal that is behind an error. Typer makes an exit of it, and a library may make anything of it."""
    while error is not None:
        if isinstance(error, Stopped):
            raise error
        error = error.__cause__ or error.__context__
    if stopping.received is not None:
        raise Stopped(stopping.received)


def _general_first(arguments: Sequence[str]) -> list[str]:
    """`--debug` and `--trust` belong to no command, so they go before the command's name, wherever the user put
    them."""
    return sorted(arguments, key=lambda argument: argument not in ("--debug", "--trust"))
