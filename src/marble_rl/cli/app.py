"""All commands, in the order of `marble --help`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from marble_rl import __version__
from marble_rl.cli import config, rating, rewards
from marble_rl.cli.bench import bench
from marble_rl.cli.failures import show_tracebacks
from marble_rl.cli.init import init
from marble_rl.cli.measuring import compare, diagnose, report
from marble_rl.cli.runs import runs
from marble_rl.cli.shared import Command, Group, set_library_verbosity
from marble_rl.cli.train import train
from marble_rl.cli.using import evaluate, export, sample
from marble_rl.distributed.world import launched
from marble_rl.errors import InputError

COMMANDS: dict[Callable[..., None], str] = {
    init: "init mini-demo",
    train: "train mini-demo --set trainer.steps=5 --out runs/try",
    runs: "runs runs/compare",
    sample: "sample runs/first --prompt 'a red ball' --images 4 --seed 7",
    evaluate: "evaluate runs/first --weights base --weights ema --images 4",
    report: "report runs/first --watch",
    export: "export runs/first --out my-lora",
    diagnose: "diagnose runs/mini --batches 50",
    compare: "compare mini --methods base,joint --seeds 0-4 --out runs/compare",
    bench: "bench --out runs/bench",
}
"""Each with an example, for its help."""

app = typer.Typer(
    name="marble",
    cls=Group,
    help="Fine-tune a diffusion or flow-matching model on many rewards at once, without reward weights.",
    epilog="Start with: marble train mini-demo --out runs/first",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for command, example in COMMANDS.items():
    app.command(cls=Command, epilog=f"Example: marble {example}")(command)
app.add_typer(config.app, name="config")
app.add_typer(rewards.app, name="rewards")
app.add_typer(rating.app, name="rate")

DISTRIBUTED = ("train", "evaluate")
"""Commands that can run on several ranks."""


def _version(value: bool) -> None:
    if value:
        typer.echo(f"marble {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the whole traceback of an error. May stand anywhere.")
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Run code that lies in the folder of a run, such as its rewards. May stand anywhere."
        ),
    ] = False,
) -> None:
    show_tracebacks(debug)
    Command.trusted = trust
    set_library_verbosity()
    command = context.invoked_subcommand
    if launched() > 1 and command not in DISTRIBUTED:
        error = InputError(
            f"marble {command}: started {launched()} times by torchrun, but only {' and '.join(DISTRIBUTED)} run on "
            "several ranks; start it without torchrun"
        )
        error.shared = True
        raise error
