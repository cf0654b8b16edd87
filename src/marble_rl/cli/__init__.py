"""The command line. Heavy packages are imported by the command that needs them, so that `--help` is instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from marble_rl.cli.app import app
from marble_rl.distributed.world import is_first, leave
from marble_rl.errors import Interrupted, MarbleError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (by default the process's own arguments) with the exit codes of errors.py."""
    sys.path.append(os.getcwd())  # rewards named by import path may lie in the current folder
    try:
        app(args=arguments)
    except SystemExit:
        leave()
        raise
    except MarbleError as error:
        if is_first() or not error.shared:
            _tell(error)
        leave(error)
        sys.exit(error.exit_code)


def _tell(error: MarbleError) -> None:
    if isinstance(error, Interrupted):
        typer.secho(str(error), err=True)
    else:
        label = "stopped" if error.exit_code == 3 else "error"
        typer.secho(f"{label}: {error}", err=True, fg=typer.colors.RED)
