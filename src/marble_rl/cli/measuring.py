"""`marble diagnose`, `compare` and `report`: how well a run or a method did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marble_rl.cli.shared import AsJson, Device, Overrides, RunCheckpoint, RunPath, print_json, quiet_libraries
from marble_rl.errors import InputError

Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="Names with commas between them; may be repeated. Sets: joint, specialists, ablations, variants, all. "
        "weights:1,2 is a weighted sum, name=key=value,... a method of your own. With base,specialists the table has "
        "shares: how much of what a training on each reward alone gains. Default: joint."
    ),
]
Against = Annotated[
    str | None, typer.Option(help="Method to compare the others with. Default: weighted_sum, if it is one of them.")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Jobs at a time. Default: one a core, with one thread; on a GPU one.")
]
EvaluateAgain = Annotated[
    bool,
    typer.Option(
        "--evaluate-again",
        help="If only held-out prompts or evaluation settings changed: keep the trainings, evaluate again.",
    ),
]


def diagnose(
    run: RunPath,
    batches: Annotated[int, typer.Option(min=3, help="Fresh mini-batches to measure.")] = 50,
    step: RunCheckpoint = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the figures. Default: RUN/diagnosis.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print all tables, not the answers alone.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Is there enough signal, which rewards oppose each other, and which rule serves the worst one?

    Draws fresh mini-batches with the run's policy and computes one gradient per reward from each. Ways to combine them
    are compared in the batch they were made from, as in the paper, and on independent batches, which is more
    informative.
    """
    quiet_libraries()
    from rich.console import Console

    from marble_rl.diagnose.printing import print_diagnosis
    from marble_rl.diagnose.run import diagnose as run_diagnosis

    folder = out or run / "diagnosis"
    diagnosis = run_diagnosis(run, batches=batches, step=step, device=device, out=folder, console=Console(stderr=True))
    if as_json:
        print_json(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis, Console(), everything)
        charts = f"; marble report {run} shows it in charts" if out is None else ""
        more = "" if everything else "; --all prints the other tables"
        typer.echo(f"\nWrote {folder / 'diagnosis.json'}{more}{charts}")


def compare(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG|DIR", help="YAML file; with --table-only the folder of a comparison.")
    ],
    methods: Methods = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-4 or 0,1,5.")] = "0-2",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the comparison.")] = Path("runs/compare"),
    overrides: Overrides = None,
    against: Against = None,
    jobs: Jobs = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the results of another config.")] = False,
    evaluate_again: EvaluateAgain = False,
    table_only: Annotated[bool, typer.Option("--table-only", help="Make the table from the results so far.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train several methods under one budget, evaluate all on the same held-out prompts, write the table.

    One job per method and seed. Ctrl-C stops and saves all of them; the same command continues them and does not run
    finished jobs again. Exit code 1 if a job crashed: its cells in the table are empty.
    """
    from rich.console import Console

    from marble_rl.compare.command import make_table, raise_for_holes, run_comparison, show
    from marble_rl.compare.selection import select_seeds

    if table_only:
        if not config.exists():
            raise InputError(f"{config}: there is no such folder; give the --out of a comparison")
        out = config if config.is_dir() else out
        comparison = make_table(out, against=against)
    elif config.is_dir():
        raise InputError(f"{config} is a folder; give a config, or --table-only to make the table from its results")
    else:
        comparison = run_comparison(
            config,
            overrides or [],
            methods or ["joint"],
            select_seeds(seeds),
            out,
            against=against,
            at_once=jobs,
            fresh=fresh,
            evaluate_again=evaluate_again,
            console=Console(stderr=True),
        )
    if as_json:
        print_json(comparison.to_json())
    else:
        show(comparison, out, Console())
    raise_for_holes(comparison, out)


def report(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="Run folder, or what `marble compare` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The file. Default: report.html in the folder.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rebuild it while the run trains; Ctrl-C ends.")] = False,
) -> None:
    """Write a report of a run or a comparison: a single HTML file that needs nothing else."""
    from marble_rl.report import watch_report, write_report

    if watch:
        watch_report(target, out, lambda file: typer.echo(f"wrote {file}; Ctrl-C ends"))
    else:
        typer.echo(f"wrote {write_report(target, out)}")
