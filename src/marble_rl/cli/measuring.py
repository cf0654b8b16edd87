"""`marble diagnose`, `compare` and `report`: how well a run or a method did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from marble_rl.cli.shared import AsJson, CheckpointName, Device, Overrides, RunPath, print_json, quiet_libraries
from marble_rl.errors import InputError

Methods = Annotated[
    list[str] | None,
    typer.Option(
        help="Names with commas between them; may be repeated. Sets: joint, specialists, ablations, variants, all. "
        "weights:1,2 is a weighted sum, name=key=value,... a method of your own. With base,specialists the table has "
        "shares: how much of what a training on each reward alone gains. Default: joint."
    ),
]
ConfigOrRuns = Annotated[
    list[Path],
    typer.Argument(metavar="CONFIG|RUN...", help="A YAML file to train from, or the folders of two or more runs."),
]
Seeds = Annotated[str | None, typer.Option(help="Such as 0-4 or 0,1,5. Default: 0-2.")]
ComparisonFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the comparison. Default: runs/compare.")
]
TableOnly = Annotated[
    bool, typer.Option("--table-only", help="CONFIG is the folder of a comparison: make its table again.")
]
Against = Annotated[
    str | None, typer.Option(help="Method to compare the others with. Default: weighted_sum, if it is one of them.")
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Jobs at a time. Default: one a core, with one thread; on a GPU one.")
]
Curve = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="STEPS",
        help="Evaluate joint methods every so many steps, for learning curves and the time to score: how long until "
        "the mean share is 0.5 and 0.8 of that of --against. Needs base and specialists.",
    ),
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
    checkpoint: CheckpointName = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the figures. Default: RUN/diagnosis.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print all tables, not the answers alone.")] = False,
    levels: Annotated[
        bool, typer.Option("--levels", help="Instead: signal and length of the gradients at each noise level.")
    ] = False,
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

    from marble_rl.diagnose.levels import LEVELS, print_levels
    from marble_rl.diagnose.printing import print_diagnosis
    from marble_rl.diagnose.run import diagnose as run_diagnosis
    from marble_rl.diagnose.run import diagnose_levels
    from marble_rl.inference.opening import chosen_step

    folder = out or run / "diagnosis"
    step = chosen_step(str(run), checkpoint)
    if levels:
        if everything:
            raise InputError("--all: --levels prints one table; leave one of the two out")
        console = Console(stderr=True)
        found = diagnose_levels(run, batches=batches, step=step, device=device, out=folder, console=console)
        print_json(found.to_json()) if as_json else print_levels(found, Console())
        if not as_json:
            typer.echo(f"\nWrote {folder / LEVELS}")
        return
    diagnosis = run_diagnosis(run, batches=batches, step=step, device=device, out=folder, console=Console(stderr=True))
    if as_json:
        print_json(diagnosis.to_json())
    else:
        print_diagnosis(diagnosis, Console(), everything)
        charts = f"; marble report {run} shows it in charts" if out is None else ""
        more = "" if everything else "; --all prints the other tables"
        typer.echo(f"\nWrote {folder / 'diagnosis.json'}{more}{charts}")


def compare(
    targets: ConfigOrRuns,
    methods: Methods = None,
    seeds: Seeds = None,
    out: ComparisonFolder = None,
    overrides: Overrides = None,
    against: Against = None,
    jobs: Jobs = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the results of another config.")] = False,
    evaluate_again: EvaluateAgain = False,
    curve: Curve = None,
    table_only: TableOnly = False,
    as_json: AsJson = False,
) -> None:
    """Train several methods under one budget, evaluate all on the same held-out prompts, write the table.

    One job per method and seed. Ctrl-C stops and saves all of them; the same command continues them and does not run
    finished jobs again. Exit code 1 if a job crashed: its cells in the table are empty.

    With the folders of two or more runs: compare these, as they are. Prints their scores, the differences to the first
    run, paired by prompt, and the settings that differ. All other options but --json belong to trainings.
    """
    if _are_runs(targets, table_only):
        given: dict[str, object] = {"--methods": methods, "--seeds": seeds, "--out": out, "--set": overrides}
        given |= {"--against": against, "--jobs": jobs, "--fresh": fresh, "--curve": curve}
        _compare_runs(targets, given | {"--evaluate-again": evaluate_again}, as_json)
        return
    from rich.console import Console

    from marble_rl.compare.command import make_table, raise_for_holes, run_comparison, show
    from marble_rl.compare.selection import select_seeds

    (config,) = targets
    out = out or Path("runs/compare")
    if table_only:
        if not config.exists():
            raise InputError(f"{config}: there is no such folder; give the --out of a comparison")
        out = config if config.is_dir() else out
        comparison = make_table(out, against=against)
    else:
        comparison = run_comparison(
            config,
            overrides or [],
            methods or ["joint"],
            select_seeds(seeds or "0-2"),
            out,
            against=against,
            at_once=jobs,
            fresh=fresh,
            evaluate_again=evaluate_again,
            curve=curve,
            console=Console(stderr=True),
        )
    print_json(comparison.to_json()) if as_json else show(comparison, out, Console())
    raise_for_holes(comparison, out)


def _are_runs(targets: Sequence[Path], table_only: bool) -> bool:
    """Whether to compare runs that exist, rather than train from a config; refuses what is neither."""
    folders = [target for target in targets if target.is_dir()]
    if len(targets) > 1:
        if table_only:
            raise InputError("--table-only: makes the table of one comparison; give its folder alone")
        if len(folders) < len(targets):
            other = next(target for target in targets if target not in folders)
            what = "a file" if other.exists() else "not there"
            raise InputError(
                f"{other} is {what}; give one CONFIG to train from, or the folders of two or more runs to compare"
            )
        return True
    if folders and not table_only:
        (folder,) = folders
        if (folder / "jobs").is_dir():
            raise InputError(f"{folder} is a comparison; --table-only makes its table again, marble report its page")
        raise InputError(
            f"{folder} is a folder; give a config to train from, or a second run to compare it with (--table-only: the "
            "table of a comparison)"
        )
    return False


def _compare_runs(folders: Sequence[Path], given: Mapping[str, object], as_json: bool) -> None:
    """``given``: options of trainings, which mean nothing here."""
    for option in (option for option, value in given.items() if value):
        raise InputError(f"{option}: {len(folders)} folders of runs are compared as they are; leave it out")
    from rich.console import Console

    from marble_rl.compare.side_by_side import read_runs, side_by_side
    from marble_rl.compare.side_by_side_table import print_side_by_side

    compared = side_by_side(read_runs(folders))
    if as_json:
        print_json(compared.to_json())
    else:
        print_side_by_side(compared, Console())
        typer.echo(f"\nCurves and pictures: marble report {' '.join(map(str, folders))}")


def report(
    targets: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...|DIR", help="Run folder, or several; or what `marble compare` wrote."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file. Default: report.html in the folder; of several runs compared.html in this one."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rebuild it while the run trains; Ctrl-C ends.")] = False,
) -> None:
    """Write a report of a run, of several runs side by side, or of a comparison: a single HTML file that needs nothing
    else."""
    from marble_rl.report import watch_report, write_report, write_side_by_side

    if len(targets) > 1:
        if watch:
            raise InputError("--watch: follows one run; leave it out, or give one")
        typer.echo(f"wrote {write_side_by_side(targets, out or Path('compared.html'))}")
        return
    (target,) = targets
    if watch:
        watch_report(
            target,
            out,
            on_built=lambda file: typer.echo(f"wrote {file}; Ctrl-C ends"),
            on_waiting=lambda: typer.echo(f"waiting for {target}: nothing to report on there yet; Ctrl-C ends"),
        )
    else:
        typer.echo(f"wrote {write_report(target, out)}")
