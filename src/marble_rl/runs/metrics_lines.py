"""Reading metrics.jsonl, the same for all who read it. A damaged line counts as none: one that a crash cut short, that
is not UTF-8, or that has no step. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from marble_rl.storage import parse_json, read_regular, reading

MOST_BYTES = 1 << 30
"""Of metrics.jsonl: more than 100,000 steps"""
LARGEST = 1e100
"""Of a value: beyond it squares and sums leave the range of a float."""
MOST_STEPS = 2**53
"""Up to here a float counts exactly."""


def read_rows(file: Path) -> list[bytes]:
    """The lines, damaged or not; none where there is no file."""
    with reading(file):
        try:
            return [row for row in read_regular(file, MOST_BYTES).split(b"\n") if row]
        except FileNotFoundError:
            return []


def parsed(row: bytes) -> dict[str, Any] | None:
    """All that a line says; None where it is damaged."""
    try:
        line = parse_json(row)
        step = line["step"]
    except (ValueError, LookupError, TypeError):
        return None
    return line if _is_number(step) and float(step).is_integer() and 0 <= step < MOST_STEPS else None


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The values of a line that are finite numbers."""
    return {key: float(value) for key, value in line.items() if _is_number(value)}


def read_lines(file: Path) -> list[dict[str, float]]:
    """The figures of every line that is not damaged, in the order of the file."""
    lines = (parsed(row) for row in read_rows(file))
    return [numbers(line) for line in lines if line is not None]


def _is_number(value: object) -> TypeGuard[int | float]:
    """Neither NaN, which no comparison holds for, nor infinite, nor an integer that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
