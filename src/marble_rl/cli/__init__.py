"""The command line. Each command imports the heavy packages that it needs, so that `--help` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from marble_rl.cli.app import app
from marble_rl.distributed.world import is_first, leave
from marble_rl.errors import Interrupted, MarbleError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of this process. Exit codes are those of errors.py."""
    sys.path.append(os.getcwd())  # rewards named by import path may lie in the current folder
    try:
        app(args=arguments)
    except SystemExit:
        leave()
        raise
    except MarbleError as error:
        if is_first() or not error.shared:
            _print_error(error)
        leave(error)
        sys.exit(error.exit_code)


def _print_error(error: MarbleError) -> None:
    if isinstance(error, Interrupted):
        typer.secho(str(error), err=True)
    else:
        label = "stopped" if error.exit_code == 3 else "error"
        typer.secho(f"{label}: {error}", err=True, fg=typer.colors.RED)
