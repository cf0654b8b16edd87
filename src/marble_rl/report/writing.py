"""Building a report and writing it: once, or again and again while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from marble_rl.errors import InputError
from marble_rl.report.comparison import comparison_page, is_comparison
from marble_rl.report.page import run_page
from marble_rl.report.reading import read_run
from marble_rl.storage import write_bytes

POLL_SECONDS = 2.0
REFRESH_SECONDS = 5
"""How often a watched page loads itself again."""


def write_report(folder: Path, out: Path | None = None, *, refresh_seconds: int | None = None) -> Path:
    """Report on a run or a comparison. The file is replaced in one piece: a reader sees the old one or the new one."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give a run, or what marble compare wrote")
    if is_comparison(folder):
        page = comparison_page(folder, refresh_seconds=refresh_seconds)
    else:
        page = run_page(read_run(folder), refresh_seconds=refresh_seconds)
    file = out or folder / "report.html"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise InputError(f"--out: cannot write {file}: {error.strerror}; give another file") from error
    return file


def watch_report(folder: Path, out: Path | None, on_built: Callable[[Path], None]) -> Path:
    """Build whenever the run has something new, until Ctrl-C; what stays behind no longer reloads itself."""
    seen: object = None
    try:
        while True:
            if (state := _state(folder)) != seen:
                on_built(write_report(folder, out, refresh_seconds=REFRESH_SECONDS))
                seen = state
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return write_report(folder, out)


def _state(folder: Path) -> object:
    """Changes whenever a page would."""
    names = ("metrics.jsonl", "samples", "evaluation/scores.json", "diagnosis/diagnosis.json", "compare.json")
    watched = [folder / name for name in names]
    return [file.stat().st_mtime_ns if file.exists() else None for file in watched]
