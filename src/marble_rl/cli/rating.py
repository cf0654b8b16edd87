"""`marble rate prepare`, `serve` and `results`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from marble_rl.cli.shared import AsJson, Command, Device, print_json, quiet_libraries, serve_extra
from marble_rl.cli.using import LARGEST_SEED, BaseModel, Side

app = typer.Typer(help="A blind rating study: people rate pictures of several models.", no_args_is_help=True)
StudyPath = Annotated[Path, typer.Argument(metavar="DIR", help="What `marble rate prepare` wrote.")]


@app.command(
    "prepare",
    cls=Command,
    epilog="Example: marble rate prepare runs/a runs/b base=mini --prompts prompts.txt --out rating",
)
def rate_prepare(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]TARGET",
            help="Two or more runs, LoRAs, pipelines, or folders of pictures. Raters never see the names.",
        ),
    ],
    prompts: Annotated[Path, typer.Option(help="Prompt file: .txt, .jsonl, .csv or .tsv.")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("rating"),
    ask: Annotated[
        Literal["scales", "pairs"],
        typer.Option(help="scales: each picture from 1 to 5. pairs: which of two is better, or the same."),
    ] = "scales",
    images: Annotated[int, typer.Option(min=1, help="Pictures per prompt and model, each with its own seed.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED // 2, help="Of the first picture.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps. Default: the first run's, or 40.")] = None,
    solver: Annotated[
        Literal["euler", "dpm2"] | None, typer.Option(help="ODE solver. Default: the first run's, or euler.")
    ] = None,
    height: Side = None,
    width: Side = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Of a video. Default: the first run's.")] = None,
    model: BaseModel = None,
    device: Device = "auto",
) -> None:
    """Sample the pictures of a study: the same prompts and seeds for every model.

    Ctrl-C stops; the same command makes the pictures that are still missing. A run is sampled with its EMA weights. The
    n-th picture of a folder, in the order of the numbers in the names, belongs to the n-th prompt.
    """
    quiet_libraries()
    from rich.console import Console

    from marble_rl.prompts import read_prompt_file
    from marble_rl.rating.prepare import default_sampling, prepare
    from marble_rl.rating.study import Study, StudyFolder
    from marble_rl.rating.targets import read_targets

    texts = [prompt.text for prompt in read_prompt_file(prompts).prompts]
    models = read_targets(targets, model)
    given = {"steps": steps, "solver": solver, "height": height, "width": width, "frames": frames}
    changes = {key: value for key, value in given.items() if value is not None}
    sampling = default_sampling(models, seed).model_copy(update=changes)
    study = Study(ask=ask, images=images, sampling=sampling, models=models, prompts=texts)
    prepare(study, StudyFolder(out), model, device, Console(stderr=True))
    typer.echo(f"wrote {out}; start with: marble rate serve {out} --raters anna,ben")


@app.command("serve", cls=Command, epilog="Example: marble rate serve rating --raters anna,ben")
def rate_serve(
    study: StudyPath,
    raters: Annotated[
        str | None,
        typer.Option(help="Names, such as anna,ben, or how many. Default: those of before, or one."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 127.0.0.1: this machine only; 0.0.0.0: also phones.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8770,
) -> None:
    """Serve the rating page, with a secret link for each rater.

    Every answer is on the disk before the page says so. After a restart the links are the same, and raters continue
    where they stopped. Ctrl-C and SIGTERM stop.
    """
    from marble_rl.rating.study import StudyFolder

    with serve_extra("rate serve"):
        from marble_rl.rating.server import serve

    serve(StudyFolder(study), raters, host=host, port=port, notice=typer.echo)


@app.command("results", cls=Command, epilog="Example: marble rate results rating")
def rate_results(study: StudyPath, as_json: AsJson = False) -> None:
    """Print means, win rates and agreement with their intervals, and write results.csv and answers.csv into DIR.

    It can be called while people still rate.
    """
    from rich.console import Console

    from marble_rl.rating.answers import read_answers
    from marble_rl.rating.printing import print_results, write_csv
    from marble_rl.rating.results import compute_results
    from marble_rl.rating.study import StudyFolder

    folder = StudyFolder(study)
    plan = folder.read()
    answers = read_answers(folder.answers)
    results = compute_results(plan, answers)
    files = write_csv(results, plan, answers, folder)
    if as_json:
        print_json(results.to_json())
    elif not answers:
        typer.echo(f"nobody has answered yet; start with: marble rate serve {study} --raters anna,ben")
    else:
        print_results(results, Console())
        typer.echo(f"wrote {files[0]} and {files[1]}")
