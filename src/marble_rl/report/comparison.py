"""Reports on what `marble compare` wrote: DIR/compare.json."""

from __future__ import annotations

from pathlib import Path

from marble_rl.errors import InputError

FILE = "compare.json"


def is_comparison(folder: Path) -> bool:
    return (folder / FILE).is_file()


def comparison_page(folder: Path) -> str:
    raise InputError(f"{folder} holds a comparison; this version reports on single runs. Give one of its run folders")
