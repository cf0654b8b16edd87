"""The files of a comparison: table.md, compare.json, compare.csv and compare.png; and its table on the terminal."""

from __future__ import annotations

import csv
import io
import math
import statistics
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marble_rl.compare.job_result import AGAIN
from marble_rl.compare.picture import draw
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import COMPARISON, Comparison, Row
from marble_rl.intervals import Interval
from marble_rl.storage import storage_errors, write_bytes

GOES_ON = ", going on"
ROOM = 3
"""Characters around a column."""
HOLE = "HOLE"
"""In place of a figure that crashed jobs left out."""
UNKNOWN = "?"
"""In place of a difference where no prompt has a score of both methods."""
HARMONY = {
    "heldout/min_cos": "held-out worst cosine",
    "ws_heldout/min_cos": "of the weighted sum",
    "heldout/conflict": "held-out conflict",
    "ws_heldout/conflict": "of the weighted sum",
    "qp/norm": "QP norm",
}


def write_table(comparison: Comparison, out: Path) -> None:
    with storage_errors(str(out), AGAIN):
        write_bytes(out / "table.md", markdown(comparison).encode())
        comparison.write(out / COMPARISON)
        write_bytes(out / "compare.csv", tidy_csv(comparison).encode())
        draw(comparison, out / "compare.png")


def print_table(comparison: Comparison, console: Console) -> None:
    for title, head, body in _tables(comparison):
        cells = [[escape(name.replace(" ", "\n")) for name in head]]
        cells += [[escape(cell.replace("**", "").replace(" ±", "\n±")) for cell in row] for row in body]
        # A file has no width: the table is not split there. Names and numbers are never cut.
        blocks = _blocks(cells, console.width) if console.is_terminal else [list(range(len(head)))]
        for columns in blocks:
            table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
            for i in columns:
                table.add_column(cells[0][i], justify="right" if i else "left", no_wrap=True)
            for row in cells[1:]:
                table.add_row(*(row[i] for i in columns))
            if not console.is_terminal:
                wanted = console.measure(table, options=console.options.update(width=1000)).maximum
                console.width = max(console.width, wanted)
            console.print(table)
            title = f"{title.removesuffix(GOES_ON)}{GOES_ON}"
    for line in notes(comparison):
        console.print(line, style="dim", markup=False, highlight=False)


def _blocks(cells: list[list[str]], width: int) -> list[list[int]]:
    """Columns that fit side by side, the first of them in every block: it names the method."""
    widths = [ROOM + max(len(line) for row in cells for line in row[i].split("\n")) for i in range(len(cells[0]))]
    blocks = [[0]]
    for i in range(1, len(widths)):
        if len(blocks[-1]) > 1 and sum(widths[j] for j in blocks[-1]) + widths[i] + 1 > width:
            blocks.append([0])
        blocks[-1].append(i)
    return blocks


def markdown(comparison: Comparison) -> str:
    parts = ["# Comparison", *(f"## {title}\n\n{table}" for title, table in markdown_tables(comparison))]
    parts.append("\n".join(f"- {line}" for line in notes(comparison)))
    parts.append("![composite and z-scores](compare.png)")
    about = [f"- `{row.method}`: {row.about}" for row in comparison.rows]
    parts.append("\n".join(["## Methods", "", *about]))
    return "\n\n".join(parts) + "\n"


def markdown_tables(comparison: Comparison) -> list[tuple[str, str]]:
    """(title, table) of each."""
    return [(title, markdown_table(head, body)) for title, head, body in _tables(comparison)]


def markdown_table(head: list[str], body: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *body])


def notes(comparison: Comparison) -> list[str]:
    """How to read the table, and what is wrong with it."""
    shown = [i for row in comparison.rows for i in (*row.figures.values(), *row.differences.values())]
    lines = [
        f"{comparison.prompts} {comparison.prompts_are} prompts x {comparison.images_per_prompt} images; "
        "mean over n seeds ± half the 95 % interval (Student's t over seeds)"
    ]
    budgets = {(row.steps, row.images_per_step) for row in comparison.rows if row.train_seconds}
    if len(budgets) == 1:
        lines.append("every training: {} steps of {} images".format(*budgets.pop()))
    if any(interval.over == "prompts" for interval in shown):
        lines.append(
            "† one seed only: bootstrap over its prompts, which leaves out how much another training would differ; "
            "no difference is marked"
        )
    if any(interval.over == "nothing" for interval in shown):
        lines.append("‡ one prompt of one seed: no interval")
    if comparison.held_out:
        lines.append("* evaluation-only: never trained on")
    lines.append(f"composite: mean over rewards of the z-score across these {len(comparison.rows)} methods")
    compared = sum(i.over == "seeds" for row in comparison.rows for i in row.differences.values())
    if compared:
        lines.append(
            f"▲ ▼ the interval of the difference leaves out 0; of {compared} differences without any effect "
            f"{0.05 * compared:.1f} would on average"
        )
    if any(row.differences and row.differences.keys() != set(comparison.columns) for row in comparison.rows):
        lines.append(f"{UNKNOWN} no prompt has a score of both methods; the composite needs every reward")
    if comparison.left_out:
        lines.append(f"left out, because not every result has it: {', '.join(comparison.left_out)}")
    if len(comparison.versions) > 1:
        lines.append(f"made with {len(comparison.versions)} different sets of package versions; see the jobs' JSONs")
    for hole in comparison.holes:
        lines.append(
            f"{HOLE}: {hole.method} seed {hole.seed} crashed ({hole.stage}, exit code {hole.exit_code}): "
            f"{hole.last_line}"
        )
    return lines


def tidy_csv(comparison: Comparison) -> str:
    """One line for each method and column."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    head = ["method", "column", "held_out", "mean", "low", "high", "n", "interval_over", "z"]
    writer.writerow([*head, "difference", "difference_low", "difference_high", "difference_n", "significant"])
    for row in comparison.rows:
        for name, figure in row.figures.items():
            cells = [row.method, name, int(name in comparison.held_out), figure.mean, figure.low, figure.high]
            cells += [figure.n, figure.over, row.z.get(name, "")]
            other = row.differences.get(name)
            if other is not None:
                cells += [other.mean, other.low, other.high, other.n, int(other.significant)]
            writer.writerow([*cells, *[""] * (len(head) + 5 - len(cells))])
    return output.getvalue()


def _tables(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, body) of each."""
    heads = [f"{name}*" if name in comparison.held_out else name for name in comparison.columns]
    columns = {name: [row.figures[name] for row in comparison.rows] for name in comparison.columns}
    body = []
    for row in comparison.rows:
        cells = [_figure(row.figures[name], column, signed=name == COMPOSITE) for name, column in columns.items()]
        body.append([row.method, _seeds(comparison, row.method, len(row.seeds)), *cells, _minutes(row), _seconds(row)])
    for method in comparison.wholly_crashed:
        body.append([method, _seeds(comparison, method, 0), *[HOLE] * len(columns), "", ""])
    tables = [("Scores", ["method", "n", *heads, "minutes", "s/step"], body)]
    compared = [row for row in comparison.rows if row.differences]
    if compared:
        body = []
        columns = {
            name: [row.differences[name] for row in compared if name in row.differences] for name in comparison.columns
        }
        for row in compared:
            cells = [_change(row.differences.get(name), column) for name, column in columns.items()]
            body.append([row.method, str(next(iter(row.differences.values())).n), *cells])
        tables.append((f"Difference to {comparison.against}, paired by seed", ["method", "n", *heads], body))
    refreshed = [row for row in comparison.rows if "heldout/min_cos" in row.training]
    if refreshed:
        trained = [name for name in comparison.rewards if name not in comparison.held_out]
        keys = [*HARMONY, *(f"alpha_bar/{name}" for name in trained)]
        body = [[row.method, *(_number(row.training.get(key)) for key in keys)] for row in refreshed]
        tables.append(("Harmony", ["method", *HARMONY.values(), *(f"alpha_bar {n}" for n in trained)], body))
    return tables


def _seeds(comparison: Comparison, method: str, done: int) -> str:
    crashed = comparison.crashed.get(method, 0)
    return f"{done} of {done + crashed}" if crashed else str(done)


def places_of(column: list[Interval]) -> int:
    """Decimals of a column: two significant digits of a typical interval."""
    typical = statistics.median(interval.half_width for interval in column)
    return 3 if typical <= 0 else min(6, max(0, 1 - math.floor(math.log10(typical))))


def _figure(interval: Interval, column: list[Interval], *, signed: bool) -> str:
    places = places_of(column)
    text = f"{interval.mean:{'+' if signed else ''}.{places}f}"
    if interval.mean == max(other.mean for other in column):
        text = f"**{text}**"
    return f"{text}{_reach(interval, places)}"


def _change(interval: Interval | None, column: list[Interval]) -> str:
    if interval is None:
        return UNKNOWN
    places = places_of(column)
    verdict = ("▲ " if interval.mean > 0 else "▼ ") if interval.significant else ""
    return f"{verdict}{interval.mean:+.{places}f}{_reach(interval, places)}"


def _reach(interval: Interval, places: int) -> str:
    if interval.over == "nothing":
        return "‡"
    return f" ±{interval.half_width:.{places}f}{'†' if interval.over == 'prompts' else ''}"


def _minutes(row: Row) -> str:
    return f"{row.train_seconds / 60:.1f}" if row.train_seconds else ""


def _seconds(row: Row) -> str:
    return f"{row.seconds_per_step:.2f}" if row.seconds_per_step else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
