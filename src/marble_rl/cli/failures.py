"""What the command line prints when a command fails: one line, what to do, and where the user's own code raised."""

from __future__ import annotations

import errno
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkstemp

import typer

from marble_rl.errors import Interrupted, MarbleError, as_message, count_of, described, shortened

UNFORESEEN = 70
"""Exit code of an error that is not in errors.py; EX_SOFTWARE of sysexits.h."""
LIBRARIES = [Path(__file__).parents[1], *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))]
"""Folders of this package and of Python's own modules."""

FRAMES = 10
"""Frames of a user's code that are printed."""

_debug = False


def show_tracebacks(value: bool) -> None:
    """What `--debug` sets."""
    global _debug
    _debug = value


def print_failure(error: MarbleError) -> None:
    """An error that a user can cause or meet."""
    if isinstance(error, Interrupted):
        typer.secho(str(error), err=True)
    else:
        label = "stopped" if error.exit_code == 3 else "error"
        typer.secho(f"{label}: {error}", err=True, fg=typer.colors.RED)
    print_traceback(error)
    if error.hint:
        typer.secho(error.hint, err=True)


def print_traceback(error: BaseException) -> None:
    """All of it with `--debug`, else only the frames of code that is neither marble's nor an installed package's."""
    if _debug:
        typer.secho("".join(traceback.format_exception(error)), err=True)
        return
    frames = own_frames(error)
    if len(frames) > FRAMES:
        typer.secho(f"  ({count_of(len(frames) - FRAMES, 'frame')} of your code before these)", err=True)
    for frame in frames[-FRAMES:]:
        typer.secho(f"  {frame.filename}:{frame.lineno} in {frame.name}: {shortened(frame.line or '', 200)}", err=True)
    if frames:
        log = getattr(error, "log_file", None)
        typer.secho(f"  (all frames: {f'{log}, or ' if log else ''}--debug)", err=True)


def print_unforeseen(error: BaseException) -> None:
    """An error that nobody foresaw: one line that names the file with the traceback. With `--debug` the traceback."""
    trace = "".join(traceback.format_exception(error))
    what = " ".join(as_message(described(error)).split()).rstrip(".")
    log = getattr(error, "log_file", None) or (None if _debug else _saved(trace))
    where = "" if log is None else f" The traceback is in {log}. Please report it; --debug prints it"
    typer.secho(f"internal error: {what}.{where}", err=True, fg=typer.colors.RED)
    if _debug or log is None:
        typer.secho(trace, err=True)


def _saved(trace: str) -> Path | None:
    """Write a traceback where there is no log of a run: to a file of its own in the folder for temporary files."""
    try:
        descriptor, name = mkstemp(prefix="marble-error-", suffix=".log", text=True)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError:
        return None
    return Path(name)


def unusable_path(error: BaseException) -> str | None:
    """What is wrong with a path that the system cannot even look for; None for any other error. Paths are used in many
    places, and in none of them is this the program's fault."""
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"{os.fsdecode(error.filename or '')}: {error.strerror}; give another path"
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return f"{error.object!r} has characters that are not valid Unicode; remove them"
    if isinstance(error, ValueError) and str(error).startswith("embedded null"):
        return "a path has a NUL character in it; remove it"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of pathlib, before Python 3.13
        return f"{error}; give another path"
    return None


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's code in the innermost exception that has any."""
    for cause in reversed(list(_causes(error))):
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if _is_own(frame.filename)]
        if frames:
            return frames
    return []


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_own(filename: str) -> bool:
    if filename.startswith("<"):  # such as <frozen importlib._bootstrap>
        return False
    file = Path(filename)
    installed = {"site-packages", "dist-packages"}.intersection(file.parts)
    return not installed and not any(file.is_relative_to(folder) for folder in LIBRARIES)
