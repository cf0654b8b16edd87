"""Values out of JSON that nobody vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from marble_rl.intervals import Difference

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading such a file can raise: it is missing, cut short, too deep, or of another form."""
LARGEST = 1e100
"""Beyond it squares and sums leave the range of a float; no run logs such a value."""
MOST_STEPS = 2**53
"""Up to here a float counts exactly."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Neither NaN, which no comparison holds for, nor infinite, nor one of JSON's endless integers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a JSON object."""
    return {str(key): float(value) for key, value in entry.items() if is_number(value)}


def number_of(value: object) -> float:
    """Raises ValueError where it is none."""
    if not is_number(value):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def step_of(entry: Mapping[str, Any]) -> int:
    """Of a line of metrics.jsonl. Raises ValueError where it is no count."""
    step = number_of(entry["step"])
    if not (step.is_integer() and 0 <= step < MOST_STEPS):
        raise ValueError(f"{step} is not a step")
    return int(step)


def spanned(entry: Mapping[str, Any]) -> Difference | None:
    """A mean with both ends of its interval; None where one of them is not a number."""
    known = numbers(entry)
    ends = ("mean", "low", "high")
    return Difference(*(known[end] for end in ends)) if set(ends) <= set(known) else None
