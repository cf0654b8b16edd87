"""Numbers, times and lists as people write them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from marble_rl.intervals import Interval

MINUS = "\N{MINUS SIGN}"
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def number(value: float, signed: bool = False) -> str:
    """Three significant digits, two of small numbers, with a true minus sign."""
    size = abs(value)
    if size != 0 and (size < 1e-4 or size >= 1e6):
        text = f"{size:.1e}"
    elif size >= 100:
        text = f"{size:.0f}"
    else:
        decimals = max(3, 1 - math.floor(math.log10(size))) if 0 < size < 1 else 2 if size < 10 else 1
        text = f"{size:.{decimals}f}"
    if float(text) == 0:
        return "0"
    return (MINUS if value < 0 else "+" if signed else "") + text


def interval(ends: Interval) -> str:
    return f"{number(ends.low, signed=True)} to {number(ends.high, signed=True)}"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def memory(mebibytes: float) -> str:
    return f"{mebibytes:.0f} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.1f} GiB"


def counted(count: int, thing: str, things: str = "") -> str:
    """`three rewards`, `one step`, `no refreshes`."""
    return f"{count_word(count)} {thing if count == 1 else things or f'{thing}s'}"


def count_word(count: int) -> str:
    return NUMBER_WORDS[count] if count < len(NUMBER_WORDS) else str(count)


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def shortened(text: str, most: int) -> str:
    """At most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…" if most > 1 else ""
