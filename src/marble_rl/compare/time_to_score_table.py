"""The table of the time to score, for the terminal and the pages."""

from __future__ import annotations

from marble_rl.compare.table import Comparison
from marble_rl.compare.time_to_score import FRACTIONS, TimeToScore
from marble_rl.intervals import Interval

TIME_TO_SCORE = f"Training until the mean share is {' and '.join(f'{f:g}' for f in FRACTIONS)} of the final one"
"""Title of the table of time to score, without the method."""


def time_to_score_tables(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """Seconds and steps to each level, and how many times as fast as the method compared with."""
    timed = [row for row in comparison.rows if row.to_score]
    if not timed:
        return []
    heads, body = ["method", "n"], []
    for level in timed[0].to_score:
        heads += [f"{level.fraction:g}: {name}" for name in ("seconds", "steps", "worst share", "times as fast")]
    for row in timed:
        cells = [row.method, str(row.to_score[0].seeds)]
        for level in row.to_score:
            worst = "" if level.worst is None else f"{level.worst:.2f}"
            cells += [_reached(level, level.seconds), _reached(level, level.steps), worst, _faster(level.faster)]
        body.append(cells)
    return [(f"{TIME_TO_SCORE} of {comparison.against}", heads, body)]


def _reached(level: TimeToScore, median: float | None) -> str:
    """The median over the seeds; how many get there, if not all."""
    some = "" if level.reached == level.seeds else f" ({level.reached} of {level.seeds})"
    return f"{'never' if median is None else f'{median:.0f}'}{some}"


def _faster(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.mean:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def time_to_score_notes(comparison: Comparison) -> list[str]:
    """How to read the table, and of which methods there is no time."""
    lines = []
    if any(row.to_score for row in comparison.rows):
        lines.append(
            f"time to score: {comparison.clock} seconds of training, evaluations left out, and steps: medians over "
            f"seeds. Times as fast as {comparison.against}: geometric mean over seeds, with its 95 % interval"
        )
        without = [row.method for row in comparison.joint if not row.to_score]
        if without:
            lines.append(
                f"no time to score of {', '.join(without)}: run without --curve, or on another device; another --out "
                "runs them all"
            )
    elif any(row.curve for row in comparison.rows):
        lines.append(
            f"no time to score: it is counted until the mean share of {comparison.against or 'another method'} "
            "(--against), which must have a curve and gain something"
        )
    return lines
