"""`marble runs`: what there is, and how far it came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marble_rl.cli.shared import AsJson, print_json, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from marble_rl.runs.overview import Latest, RunOverview

DEFAULT = Path("runs")
START = "marble train mini-demo --out runs/first"
STYLES = {"running": "green", "finished": "", "stopped": "yellow", "crashed": "red"}
LEGEND = {
    "stopped": "stopped: everything logged is saved; --resume continues",
    "crashed": "crashed: ended without saving its last steps (killed, power, full disk); --resume repeats them",
}


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder of runs, at any depth.")] = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """List the runs below DIR: status, steps, when last written, model, rule, latest scores, size on disk.

    Scores are those of the newest evaluation (held-out or validation prompts); of a run that has none, the rewards of
    its last training step.
    """
    from marble_rl.runs.overview import find_runs

    missing = folder == DEFAULT and not folder.exists()
    found, broken = ([], []) if missing else find_runs(folder)
    if as_json:
        print_json({"runs": [run.to_json() for run in found], "broken": [vars(entry) for entry in broken]})
        return
    from rich.console import Console

    console = Console()
    if found:
        table = _table(found, folder)
        if not console.is_terminal:  # a file has no width: nothing is cut or wrapped there
            console.width = console.measure(table, options=console.options.update(width=10_000)).maximum
        console.print(table)
        for word, meaning in LEGEND.items():
            if any(run.status == word for run in found):
                console.print(meaning, style="dim", highlight=False, soft_wrap=True)
        if not all(run.certain for run in found):
            unsure = "?: the lock of another machine cannot be asked; judged by how long ago a step was logged"
            console.print(unsure, style="dim", highlight=False, soft_wrap=True)
    elif not broken:
        typer.echo(f"no runs in {folder} yet; start one: {START}")
    for entry in broken:
        typer.secho(f"not readable: {entry.path}: {entry.reason}", err=True, fg=typer.colors.RED)


def _table(found: Sequence[RunOverview], folder: Path) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in ("run", "status", "steps", "last step", "model", "rule", "scores", "size"):
        table.add_column(name, justify="right" if name in ("steps", "size") else "left", no_wrap=name != "scores")
    for run in found:
        place = Path(run.path).relative_to(folder)
        model = Path(run.model)
        style = STYLES[run.status]
        word = run.status + ("" if run.certain else "?")
        table.add_row(
            escape(str(place if place.parts else run.path)),
            f"[{style}]{word}[/{style}]" if style else word,
            f"{run.steps_done}/{run.steps}" + ("" if run.best is None else f", best {run.best}"),
            _ago(time.time() - run.written),
            escape(model.name if model.is_absolute() else run.model),
            escape(run.rule),
            escape(_scores(run)),
            size_text(run.size),
        )
    return table


def _scores(run: RunOverview) -> str:
    if run.evaluation is not None:
        return _means(run.evaluation, "evaluated after step")
    return "" if run.training is None else _means(run.training, "training, step")


def _means(latest: Latest, where: str) -> str:
    means = "  ".join(f"{name} {mean:.4g}" for name, mean in latest.means.items())
    return f"{means}  ({where} {latest.step})"


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"
