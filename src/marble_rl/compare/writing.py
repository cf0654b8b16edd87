"""The files of a comparison: table.md, compare.json, compare.csv and compare.png; and its table on the terminal."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from marble_rl.compare.job_result import AGAIN
from marble_rl.compare.methods import BASE
from marble_rl.compare.picture import draw
from marble_rl.compare.shares import MEAN, WORST
from marble_rl.compare.statistics import COMPOSITE
from marble_rl.compare.table import COMPARISON, Comparison, Row
from marble_rl.compare.time_to_score_table import time_to_score_notes, time_to_score_tables
from marble_rl.errors import count_of
from marble_rl.intervals import Interval
from marble_rl.storage import storage_errors, write_bytes

GOES_ON = ", going on"
ROOM = 3
"""Characters around a column."""
HOLE = "HOLE"
"""In place of a figure that crashed jobs left out."""
SHARES = "How much of a specialist's gain"
"""Title of the table of shares by reward."""
UNKNOWN = "?"
"""In place of a difference where no prompt has a score of both methods."""
HARMONY = {
    "heldout/min_cos": "worst cosine, unseen samples",
    "ws_heldout/min_cos": "of the weighted sum",
    "heldout/conflict": "conflict, unseen samples",
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
        cells = [[name.replace(" ", "\n") for name in head]]
        cells += [[cell.replace("**", "").replace(" ±", "\n±") for cell in row] for row in body]
        print_cells(title, cells, console)
    print_notes(notes(comparison), console)


def print_cells(title: str, cells: list[list[str]], console: Console) -> None:
    """A table, its head first, in as many blocks as the terminal needs. Names and numbers are never cut, and a file has
    no width: the table is not split there."""
    cells = [[escape(cell) for cell in row] for row in cells]
    blocks = _blocks(cells, console.width) if console.is_terminal else [list(range(len(cells[0])))]
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


def print_notes(lines: Iterable[str], console: Console) -> None:
    for line in lines:
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
    parts.append("![the methods with their intervals](compare.png)")
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
        f"{count_of(comparison.prompts, f'{comparison.prompts_are} prompt')} x "
        f"{count_of(comparison.images_per_prompt, 'image')}; "
        "mean over n seeds ± half the 95 % interval (Student's t over seeds)"
    ]
    budgets = {(row.steps, row.images_per_step) for row in comparison.rows if row.train_seconds}
    if len(budgets) == 1:
        ((steps, images),) = budgets
        lines.append(f"every training: {count_of(steps, 'step')}, {images:g} images sampled for each")
    if any(interval.over == "prompts" for interval in shown):
        lines.append(
            "† one seed only: bootstrap over its prompts, which leaves out how much another training would differ; "
            "no difference is marked"
        )
    if any(interval.over == "nothing" for interval in shown):
        lines.append("‡ one prompt of one seed: no interval")
    if comparison.held_out:
        lines.append("* evaluation-only: never trained on")
    lines += share_notes(comparison)
    if comparison.has_composite:
        lines.append(
            f"{COMPOSITE}: mean over rewards of the z-score across these {len(comparison.rows)} methods; marked only "
            "where some reward is"
        )
    else:
        lines.append(f"no {COMPOSITE}: it needs three methods; of two every z-score is +1 or -1")
    compared = sum(i.over == "seeds" for row in comparison.rows for i in row.differences.values())
    if compared:
        lines.append(
            f"▲ ▼ the interval of the difference leaves out 0; of {compared} differences without any effect "
            f"{0.05 * compared:.1f} would on average"
        )
    if any(row.differences and not row.differences.keys() >= set(comparison.rewards) for row in comparison.rows):
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


def share_notes(comparison: Comparison) -> list[str]:
    """What shares are, of which reward and method there are none, and how to get them."""
    lines = []
    if comparison.has_shares:
        lines.append(
            f"share: a reward's gain over {BASE}, divided by the mean gain of the trainings on it alone; {WORST} and "
            f"{MEAN}: over the trained rewards for each seed. Their intervals include the noise of both gains. "
            "Bold in the table by reward: the smallest"
        )
        fewer = [r for r in comparison.joint if WORST not in r.figures or r.figures[WORST].n != len(r.seeds)]
        if fewer:
            names = ", ".join(row.method for row in fewer)
            lines.append(f"shares only of the seeds that {BASE} has, too: fewer than n of {names}")
    for reward, reason in comparison.no_share.items():
        lines.append(f"no share of {reward}, which is left out of {WORST} and {MEAN} for every method: {reason}")
    lines += time_to_score_notes(comparison)
    if comparison.jobs_for_shares:
        missing = dict.fromkeys(method for method, _ in comparison.jobs_for_shares)
        lines.append(
            f"no {WORST} and {MEAN} (of what a training on each reward alone gains): they need {', '.join(missing)}. "
            f"The same command with --methods ...,specialists,{BASE} adds them: "
            f"{len(comparison.jobs_for_shares)} more jobs"
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
                cells += [other.mean, other.low, other.high, other.n, int(row.decided(name))]
            writer.writerow([*cells, *[""] * (len(head) + 5 - len(cells))])
    return output.getvalue()


def _tables(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, body) of each."""
    columns = {
        name: [row.figures[name] for row in comparison.rows if name in row.figures] for name in comparison.columns
    }
    body = []
    for row in comparison.rows:
        cells = [_figure(row.figures.get(name), column, signed=name == COMPOSITE) for name, column in columns.items()]
        body.append([row.method, _seeds(comparison, row.method, len(row.seeds)), *cells, _minutes(row), _seconds(row)])
    for method in comparison.wholly_crashed:
        body.append([method, _seeds(comparison, method, 0), *[HOLE] * len(columns), "", ""])
    tables = [("Scores", ["method", "n", *_heads(comparison, columns), "minutes", "s/step"], body)]
    tables += [*_differences(comparison), *_shares(comparison), *time_to_score_tables(comparison)]
    return [*tables, *_harmony(comparison)]


def _heads(comparison: Comparison, columns: Iterable[str]) -> list[str]:
    return [f"{name}*" if name in comparison.held_out else name for name in columns]


def _differences(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    compared = [row for row in comparison.rows if row.differences]
    if not compared:
        return []
    columns = {
        name: [row.differences[name] for row in compared if name in row.differences] for name in comparison.columns
    }
    columns = {name: column for name, column in columns.items() if column or name not in (WORST, MEAN)}
    body = []
    for row in compared:
        cells = [_change(row, name, column) for name, column in columns.items()]
        body.append([row.method, str(next(iter(row.differences.values())).n), *cells])
    heads = ["method", "n", *_heads(comparison, columns)]
    return [(f"Difference to {comparison.against}, paired by seed", heads, body)]


def _shares(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """By reward; the smallest of each method in bold."""
    sharing = [row for row in comparison.rows if row.shares]
    if not sharing:
        return []
    body = []
    for row in sharing:
        least = min(share.mean for share in row.shares.values())
        cells = [_figure(row.shares[name], list(row.shares.values()), best=least) for name in row.shares]
        body.append([row.method, str(row.figures[WORST].n), *cells])
    return [(SHARES, ["method", "n", *sharing[0].shares], body)]


def _harmony(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    refreshed = [row for row in comparison.rows if "heldout/min_cos" in row.training]
    if not refreshed:
        return []
    keys = [*HARMONY, *(f"alpha_bar/{name}" for name in comparison.trained)]
    body = [[row.method, *(_number(row.training.get(key)) for key in keys)] for row in refreshed]
    return [("Harmony", ["method", *HARMONY.values(), *(f"alpha_bar {n}" for n in comparison.trained)], body)]


def _seeds(comparison: Comparison, method: str, done: int) -> str:
    crashed = comparison.crashed.get(method, 0)
    return f"{done} of {done + crashed}" if crashed else str(done)


def places_of(column: list[Interval]) -> int:
    """Decimals of a column: two significant digits of a typical interval."""
    typical = statistics.median(interval.half_width for interval in column)
    return 3 if typical <= 0 else min(6, max(0, 1 - math.floor(math.log10(typical))))


def _figure(
    interval: Interval | None, column: list[Interval], *, signed: bool = False, best: float | None = None
) -> str:
    """Bold if it is ``best``, by default the highest of the column; empty where there is none."""
    if interval is None:
        return ""
    places = places_of(column)
    text = f"{interval.mean:{'+' if signed else ''}.{places}f}"
    if interval.mean == (max(other.mean for other in column) if best is None else best):
        text = f"**{text}**"
    return f"{text}{_reach(interval, places)}"


def _change(row: Row, name: str, column: list[Interval]) -> str:
    interval = row.differences.get(name)
    if interval is None:
        return "" if name in (WORST, MEAN) else UNKNOWN
    places = places_of(column)
    verdict = ("▲ " if interval.mean > 0 else "▼ ") if row.decided(name) else ""
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
