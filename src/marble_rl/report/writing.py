"""Building a report and writing it: once, or again and again while a run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from marble_rl.compare.jobs import JOBS
from marble_rl.compare.table import COMPARISON
from marble_rl.diagnose.record import DIAGNOSIS
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import InputError
from marble_rl.report.comparison import NothingYet, comparison_page, is_comparison
from marble_rl.report.page import run_page
from marble_rl.report.run_data import read_run
from marble_rl.report.side_by_side import side_by_side_page
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.scores import SCORES
from marble_rl.storage import write_bytes

POLL_SECONDS = 2.0
REFRESH_SECONDS = 5
"""How often a watched page loads itself again."""
AGE_SECONDS = 60.0
"""How often a watched page is built again although nothing is new, as long as its run is unfinished."""


def write_report(folder: Path, out: Path | None = None, *, refresh_seconds: int | None = None) -> Path:
    """Report on a run or a comparison. The file is replaced in one piece: a reader sees the old one or the new one."""
    return _build(folder, out, refresh_seconds)[0]


def write_side_by_side(folders: Sequence[Path], out: Path) -> Path:
    """Report on several runs."""
    return _write(side_by_side_page(folders), out)


def watch_report(
    folder: Path,
    out: Path | None,
    on_built: Callable[[Path], None],
    on_waiting: Callable[[], None] = lambda: None,
) -> Path | None:
    """Build whenever there is something new, until a signal; the page that remains no longer reloads itself. None:
    there was nothing to report on until then, and ``on_waiting`` said so.

    A run that dies writes nothing any more, so an unfinished one is built again from time to time as well.
    """
    seen: object = None
    due = math.inf
    with Interrupts(lambda text: None) as interrupts:
        while not interrupts.pending():
            state, now = _state(folder), time.monotonic()
            if state != seen or now >= due:
                ages = False
                try:
                    file, ages = _build(folder, out, REFRESH_SECONDS)
                    if state != seen:
                        on_built(file)
                except NothingYet:
                    if seen is None:
                        on_waiting()
                seen, due = state, now + AGE_SECONDS if ages else math.inf
            time.sleep(POLL_SECONDS)
        try:
            return write_report(folder, out)
        except NothingYet:
            return None


def _build(folder: Path, out: Path | None, refresh_seconds: int | None) -> tuple[Path, bool]:
    """The file, and whether its page ages: it says how long ago an unfinished run logged something."""
    if _is_to_come(folder):
        raise NothingYet(f"{folder}: there is no run yet; give one, or what marble compare wrote, or --watch to wait")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a run, or what marble compare wrote")
    ages = False
    file = out or folder / "report.html"
    if is_comparison(folder):
        page = comparison_page(folder, refresh_seconds=refresh_seconds)
    else:
        run = read_run(folder)
        page, ages = run_page(run, folder=file.parent, refresh_seconds=refresh_seconds), not run.finished
    return _write(page, file), ages


def _write(page: str, file: Path) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise InputError(f"--out: cannot write {file}: {error.strerror}; give another file") from error
    return file


def _is_to_come(folder: Path) -> bool:
    """Whether nothing is there, or nothing but the lock of a run that is about to start."""
    if not folder.is_dir():
        return not folder.exists()
    return all(entry.name.startswith(".") for entry in folder.iterdir())


def _state(folder: Path) -> object:
    """Changes whenever a page would."""
    names = ("config.json", "metrics.jsonl", f"evaluation/{SCORES}", f"diagnosis/{DIAGNOSIS}", COMPARISON)
    results = sorted((folder / JOBS).glob("*.json"))
    modified = {file: _modified(file) for file in (*(folder / name for name in (*names, "samples", JOBS)), *results)}
    return modified, RunFolder(folder).in_use()


def _modified(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:  # not there, or no longer
        return None
