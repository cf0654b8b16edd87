"""The command line. Heavy packages are imported by the command that needs them, so that `--help` is instant."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marble_rl import __version__
from marble_rl.distributed import is_first, join, launched, leave
from marble_rl.errors import InputError, Interrupted, MarbleError

if TYPE_CHECKING:
    from marble_rl.config.schema import RewardConfig, RunConfig

app = typer.Typer(
    name="marble",
    help="Fine-tune a diffusion or flow-matching model on many rewards at once, without reward weights.",
    epilog="Start with: marble train configs/tiny.yaml --out runs/first",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
config_app = typer.Typer(help="Look at a config before running it.", no_args_is_help=True)
rewards_app = typer.Typer(help="Rewards that can be trained on.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(rewards_app, name="rewards")

DISTRIBUTED = ("train", "evaluate")
"""Commands that several processes can share."""

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, or the config.json of a run.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Weights = Annotated[str, typer.Option(help="ema, default (as trained last), old (sampling policy) or base.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


@app.command(epilog="Example: marble train configs/tiny.yaml --set trainer.steps=5 --out runs/try")
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/ and the config's name.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a LoRA on all rewards of CONFIG at once.

    Ctrl-C finishes the step under way, saves and stops; `--resume` goes on as if nothing had happened.
    Several processes: `torchrun --standalone --nproc-per-node 8 -m marble_rl.cli train CONFIG` (docs/distributed.md).
    """
    from marble_rl.config import load_config

    folder = out or Path("runs") / config.stem
    world = join()
    with world.agreed():
        run = load_config(config, overrides or [])
    _quiet_libraries()
    from rich.console import Console

    from marble_rl.runfolder import RunFolder
    from marble_rl.summary import print_summary
    from marble_rl.trainer import Trainer

    result = Trainer(run, folder, resume=resume, world=world).train()
    if not world.first:
        return
    if as_json:
        _print_json(
            {
                "out": str(result.out),
                "steps": result.steps,
                "lora": str(result.lora),
                "metrics": result.metrics,
            }
        )
    else:
        print_summary(Console(), RunFolder(result.out).metrics, run.trained_rewards)
        typer.echo(
            f"\nDone: {result.steps} steps. LoRA for plain diffusers: {result.lora}\n\n"
            f"  marble sample {result.out} --prompt 'a prompt'\n"
            f"  marble evaluate {result.out}\n"
            f"  marble report {result.out}\n"
            f"  marble export {result.out} --out my-lora"
        )


@app.command(epilog="Example: marble sample runs/first --prompt 'a red ball' --images 4 --seed 7")
def sample(
    target: Annotated[str, typer.Argument(metavar="RUN|LORA|MODEL", help="Run, exported LoRA, or pipeline.")],
    prompt: Annotated[str, typer.Option(help="What to draw.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNG files, or WebP for videos.")] = Path("samples"),
    images: Annotated[int, typer.Option(min=1, help="How many; image i uses seed + i.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first image.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps. Default: the run's, or 40.")] = None,
    solver: Annotated[str | None, typer.Option(help="euler or dpm2. Default: the run's, or euler.")] = None,
    height: Annotated[int | None, typer.Option(min=8, help="Default: the run's, or the model's.")] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Default: the run's, or the model's.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Of a video. Default: the run's, or the model's.")] = None,
    weights: Weights = "ema",
    step: Annotated[int | None, typer.Option(help="Which checkpoint of a run. Default: the newest.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model of a LoRA that does not name it.")] = None,
    device: Device = "auto",
) -> None:
    """Draw images. The same arguments give the same images as plain diffusers with guidance_scale=1."""
    role = _role(weights)
    if solver not in (None, "euler", "dpm2"):
        raise InputError(f"--solver: unknown solver {solver!r}; use euler or dpm2")
    _quiet_libraries()
    from marble_rl.config.schema import EvaluationConfig, RolloutConfig
    from marble_rl.images import save_sample
    from marble_rl.inference import open_target, sample_images

    opened = open_target(target, model_path=model, step=step, device=device)
    defaults = opened.config.evaluation if opened.config else EvaluationConfig()
    size = opened.config.rollout if opened.config else RolloutConfig()
    with opened.acting_as(role):
        pictures = sample_images(
            opened,
            prompt,
            seed=seed,
            images=images,
            steps=steps or defaults.steps,
            solver=solver or defaults.solver,  # type: ignore[arg-type]
            height=height or size.height,
            width=width or size.width,
            frames=frames or size.frames,
        )
    for i, picture in enumerate(pictures):
        typer.echo(save_sample(picture, out / f"seed-{seed + i}"))


@app.command(epilog="Example: marble evaluate runs/first --weights base --weights ema --images 4")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|LORA|MODEL", help="Run, exported LoRA, or pipeline.")],
    config: Annotated[
        Path | None, typer.Option(help="Config with prompts and rewards; needed unless the target is a run.")
    ] = None,
    overrides: Overrides = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(help="Of a run: base, ema, default, old; may be repeated. Default: base, ema."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to use instead of the config's held-out ones.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Images per prompt.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the evaluation.")] = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint of a run. Default: the newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for scores and grids. Default: RUN/evaluation.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model of a LoRA that does not name it.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score held-out prompts with every reward, seeded image by image."""
    from marble_rl.config import load_config
    from marble_rl.runfolder import RunFolder

    changes = [*(overrides or []), "lora.init=null"]  # what a run started from is not needed any more
    changes += [] if images is None else [f"evaluation.images_per_prompt={images}"]
    changes += [] if seed is None else [f"evaluation.seed={seed}"]
    world = join()
    with world.agreed():
        roles = [_role(weight) for weight in weights or ["base", "ema"]]
        is_run = RunFolder(Path(target)).exists
        if config is None and not is_run:
            raise InputError(f"--config: {target} is not a run folder, so say which prompts and rewards to use")
        settings = load_config(config, changes) if config else RunFolder(Path(target)).load_config(changes)
    _quiet_libraries()
    from marble_rl.evaluation_report import evaluate_target

    with world.agreed():
        report = evaluate_target(
            target,
            settings,
            roles if is_run else ["given"],
            prompts_file=prompts,
            model_path=model,
            step=step,
            device=device,
            out=out or (Path(target) / "evaluation" if is_run else Path("evaluation")),
            world=world,
        )
    if not world.first:
        return
    if as_json:
        _print_json(report.to_json())
    else:
        report.print()


@app.command(epilog="Example: marble report runs/first --watch")
def report(
    target: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="Run folder, or what `marble compare` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The file. Default: report.html in the folder.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Build it again while the run goes on; Ctrl-C ends.")] = False,
) -> None:
    """Show how a run went, on one HTML page with nothing to load beside it."""
    from marble_rl.report import watch_report, write_report

    if watch:
        watch_report(target, out, lambda file: typer.echo(f"wrote {file}; Ctrl-C ends"))
    else:
        typer.echo(f"wrote {write_report(target, out)}")


@app.command(epilog="Example: marble export runs/first --out my-lora")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[Path, typer.Option(help="New folder for the LoRA, or the pipeline.")],
    weights: Weights = "ema",
    step: Annotated[int | None, typer.Option(help="Which checkpoint. Default: the newest.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="The whole pipeline with the LoRA in its weights.")] = False,
    dtype: Annotated[str, typer.Option(help="Of merged weights: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write a LoRA that plain diffusers' `load_lora_weights` opens, or a merged pipeline for `from_pretrained`.

    Beside it a README.md, ready for the hub: what it was trained on, its scores (if RUN was evaluated), how to call it.
    """
    from marble_rl.runfolder import RunFolder

    role = _role(weights)
    if role == "base":
        raise InputError("--weights: 'base' is the model without LoRA; use ema, default or old")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(f"--dtype: unknown {dtype!r}; use float32, bfloat16 or float16")
    folder = RunFolder(run)
    folder.load_config()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"--out: {out} is not empty; give another folder")
    _quiet_libraries()
    import torch

    from marble_rl.export import export_lora, export_merged
    from marble_rl.inference import open_target

    opened = open_target(str(run), step=step, device="cpu", plain=True)
    if merged:
        remarks = export_merged(opened, role, out, folder, getattr(torch, dtype))
    else:
        remarks = export_lora(opened, role, out, folder)
    for remark in remarks:
        typer.secho(remark, err=True)
    opener = f"{opened.model.plain_call()[0]}.from_pretrained" if merged else "pipe.load_lora_weights"
    typer.echo(f"wrote {out}; open it with {opener}({str(out)!r})")


@app.command(epilog="Example: marble diagnose runs/mini --batches 50")
def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    batches: Annotated[int, typer.Option(min=3, help="Fresh mini-batches to measure.")] = 50,
    step: Annotated[int | None, typer.Option(help="Which checkpoint. Default: the newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the figures. Default: RUN/diagnosis.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how well each way to combine the rewards serves each of them.

    Draws fresh mini-batches with the run's policy and takes one gradient per reward from each. Directions are compared
    in the batch they were made from, as the paper does, and on independent ones, which tells more.
    """
    _quiet_libraries()
    from rich.console import Console

    from marble_rl.diagnose.printing import print_diagnosis
    from marble_rl.diagnose.run import diagnose as run_diagnosis

    folder = out or run / "diagnosis"
    found = run_diagnosis(run, batches=batches, step=step, device=device, out=folder, console=Console(stderr=True))
    if as_json:
        _print_json(found.to_json())
    else:
        print_diagnosis(found, Console())
        typer.echo(f"\nWrote {folder / 'diagnosis.json'} and {folder / 'diagnosis.png'}")


@app.command(epilog="Example: marble compare configs/mini.yaml --methods base,joint --seeds 0-4 --out runs/compare")
def compare(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG|DIR", help="YAML file; with --table-only the folder of a comparison.")
    ],
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Names with commas between them; may be repeated. Sets: joint, specialists, ablations, variants, all. "
            "weights:1,2 is a weighted sum, name=key=value,... a method of your own. Default: joint."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0-4 or 0,1,5.")] = "0-2",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the comparison.")] = Path("runs/compare"),
    overrides: Overrides = None,
    against: Annotated[
        str | None, typer.Option(help="Method that differences are taken to. Default: weighted_sum, if there.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Jobs at a time. Default: one a core, with one thread; on a GPU one.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what was made with another config.")] = False,
    table_only: Annotated[bool, typer.Option("--table-only", help="Make the table of the results there are.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train several methods under one budget, evaluate all on the same held-out prompts, write the table.

    One job per method and seed. Ctrl-C stops and saves all of them; the same command goes on, and jobs that are
    finished are not run again. Exit code 1 if a job crashed: the table then has a hole.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # imported only where jobs are run
    from dataclasses import asdict

    from rich.console import Console

    from marble_rl.compare.command import make_table, raise_for_holes, run_comparison, show
    from marble_rl.compare.selection import select_seeds

    if table_only:
        out = config if config.is_dir() else out
        found = make_table(out, against=against)
    elif config.is_dir():
        raise InputError(f"{config} is a folder; give a config, or --table-only to make the table of what is there")
    else:
        found = run_comparison(
            config,
            overrides or [],
            methods or ["joint"],
            select_seeds(seeds),
            out,
            against=against,
            at_once=jobs,
            fresh=fresh,
            console=Console(stderr=True),
        )
    if as_json:
        _print_json(asdict(found))
    else:
        show(found, out, Console())
    raise_for_holes(found, out)


@app.command(epilog="Example: marble bench --out runs/bench")
def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.json and bench.png.")] = Path("runs/bench"),
    rounds: Annotated[int, typer.Option(min=1, help="How often every step is timed.")] = 3,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure what one gradient per reward costs on this machine, beside a weighted sum.

    Up to ten minutes on one CPU core. Every step runs once in each round; speeds are ratios within a round.
    """
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # read when numpy is imported
    _quiet_libraries()
    from dataclasses import asdict

    from rich.console import Console

    from marble_rl.bench.run import print_bench, run_bench, write_bench
    from marble_rl.bench.workload import Size
    from marble_rl.models import pick_device

    found = run_bench(pick_device(device), rounds, Size(), Console(stderr=True))
    write_bench(found, out)
    if as_json:
        _print_json(asdict(found))
    else:
        print_bench(found, Console())
        typer.echo(f"\nWrote {out / 'bench.json'} and {out / 'bench.png'}")


@config_app.command("show", epilog="Example: marble config show configs/tiny.yaml --set trainer.steps=5")
def config_show(
    config: ConfigPath,
    overrides: Overrides = None,
    estimate: Annotated[
        bool | None,
        typer.Option(help="Memory that the run needs, from the model's configs. Default: yes, with --json no."),
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Estimate for this device: cpu or cuda. Default: the config's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved config, defaults included, and an estimate of its memory as comments at the end."""
    from marble_rl.config import dump_config, load_config, to_yaml

    run = load_config(config, overrides or [])
    if not as_json:
        typer.echo(to_yaml(run), nl=False)
        if estimate is not False:
            for line in _estimated(run, on)[1]:
                typer.echo(f"# {line}".rstrip())
    elif estimate:
        _print_json({"config": json.loads(dump_config(run)), "estimate": _estimated(run, on)[0]})
    else:
        typer.echo(dump_config(run), nl=False)


def _estimated(run: RunConfig, on: str | None) -> tuple[dict[str, Any] | None, list[str]]:
    """For programs, and in lines for people; a model that is out of reach is no error."""
    _quiet_libraries()
    import torch

    from marble_rl.estimate import describe, estimate_run
    from marble_rl.models import pick_device

    try:
        device = pick_device(run.model.device) if on is None else torch.device(on)
        found = estimate_run(run, device)
    except InputError as error:
        return None, [f"Memory: no estimate. {error}"]
    return found.to_json(), describe(found, run, device)


@config_app.command("check", epilog="Example: marble config check configs/tiny.yaml")
def config_check(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a config, its prompts and its rewards, without loading a model."""
    from marble_rl.config import load_config

    run = load_config(config, overrides or [])
    from marble_rl.inputs import check_inputs

    inputs = check_inputs(run)
    images = run.rollout.groups * run.rollout.group_size
    sizes = {name: len(prompts) for name, prompts in inputs.train.sources.items()}
    facts = {
        "rewards": list(run.trained_rewards),
        "balance": run.balance.type,
        "prompts": sizes,
        "images_per_rollout": images,
        "steps": run.trainer.steps,
    }
    if as_json:
        _print_json(facts)
    else:
        sources = ", ".join(f"{name} ({count})" for name, count in sizes.items())
        typer.echo(
            f"{config}: ok. {run.balance.type} on {', '.join(run.trained_rewards)}; prompts: {sources}; "
            f"{images} images a rollout, {run.trainer.steps} steps"
        )


@rewards_app.command("list", epilog="Example: marble rewards list")
def rewards_list(as_json: AsJson = False) -> None:
    """List the built-in rewards. Any `package.module:name` works too."""
    from marble_rl.rewards.registry import describe_built_in

    described = describe_built_in()
    if as_json:
        _print_json(described)
    else:
        for name, text in described.items():
            typer.echo(f"{name:24}{text}")


@rewards_app.command("check", epilog="Example: marble rewards check configs/mini.yaml --only ocr --image sign.png")
def rewards_check(
    config: ConfigPath,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Check this reward; may be repeated. Default: all.")
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Picture to score. Default: one that is drawn here.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Its prompt. Default: the first that a reward applies to.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a sample picture with each reward of CONFIG: score, latency, memory, finite, deterministic.

    CONFIG may be a run's config, or have a `rewards` section only. Every reward is loaded and called as in training.
    Exit code 1 if one of them fails.
    """
    from dataclasses import asdict

    from marble_rl.config import load_scoring_config

    settings = load_scoring_config(config, overrides or [])
    configs = _chosen_rewards(settings, only)
    _quiet_libraries()
    from rich.console import Console

    from marble_rl.models import pick_device
    from marble_rl.prompts import load_prompts
    from marble_rl.rewards.checking import ChecksFailed, check_reward, print_checks, read_picture
    from marble_rl.rewards.registry import build_rewards
    from marble_rl.rewards.scoring import Scorer
    from marble_rl.types import Prompt

    given = [] if prompt is None else [Prompt(0, prompt, "given")]
    sources = settings.prompts.train
    known = given or (load_prompts(sources, "prompts.train").prompts if sources else [])
    picture = None if image is None else read_picture(image)
    chosen = pick_device(device)
    scorer = Scorer(configs, build_rewards(configs))
    with Console(stderr=True).status("checking rewards"):
        checks = [check_reward(scorer[name], chosen, known, picture) for name in scorer.names]
    if as_json:
        _print_json([asdict(check) for check in checks])
    else:
        print_checks(checks, {name: scorer[name].traits for name in scorer.names}, Console())
    failed = [check.name for check in checks if check.error is not None]
    if failed:
        raise ChecksFailed(f"{len(failed)} of {len(checks)} rewards failed: {', '.join(failed)}")


@rewards_app.command("serve", epilog="Example: marble rewards serve configs/mini.yaml --only pickscore --only hpsv2")
def rewards_serve(
    config: ConfigPath,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on. 127.0.0.1: this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Serve this reward; may be repeated. Default: all.")
    ] = None,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 256,
    max_batch: Annotated[int, typer.Option(min=1, help="Most images in a request.")] = 512,
    device: Device = "auto",
) -> None:
    """Serve the rewards of CONFIG over HTTP, for `type: remote` in another config.

    CONFIG may be a run's config, or have a `rewards` section only. To serve on any address that other machines can
    reach, set MARBLE_REWARDS_TOKEN here and where you train. Ctrl-C and SIGTERM finish the requests under way.
    """
    from marble_rl.config import load_scoring_config

    configs = _chosen_rewards(load_scoring_config(config, overrides or []), only)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # diffusers is not needed here, so not imported to hush it
    from marble_rl.models import pick_device
    from marble_rl.rewards.server import Limits, serve

    serve(
        configs,
        host=host,
        port=port,
        limits=Limits(max_body_mb << 20, max_batch),
        device=pick_device(device),
        notice=typer.echo,
    )


def _chosen_rewards(settings: RunConfig, only: list[str] | None) -> list[RewardConfig]:
    from marble_rl.config import require_name

    for name in only or []:
        require_name(name, [entry.name for entry in settings.rewards], "--only")
    return [entry for entry in settings.rewards if not only or entry.name in only]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"marble {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    command = context.invoked_subcommand
    if launched() > 1 and command not in DISTRIBUTED:
        error = InputError(
            f"marble {command}: started {launched()} times by torchrun, but only {' and '.join(DISTRIBUTED)} run in "
            "several processes; start it without torchrun"
        )
        error.shared = True
        raise error


def _role(weights: str) -> Any:
    roles = ("ema", "default", "old", "base")
    if weights not in roles:
        raise InputError(f"--weights: unknown weights {weights!r}; use one of {', '.join(roles)}")
    return weights


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _quiet_libraries() -> None:
    """Keep the loading chatter of transformers and diffusers off the terminal; their download bars stay."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    from diffusers.utils import logging as diffusers_logging
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (by default the process's own arguments) with the exit codes of errors.py."""
    sys.path.append(os.getcwd())  # rewards named by import path may lie in the current folder
    try:
        app(args=arguments)
    except SystemExit:
        leave()
        raise
    except MarbleError as error:
        if is_first() or not error.shared:
            _tell(error)
        leave(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.secho("stopped at once; what the last checkpoint holds is safe", err=True)
        sys.exit(130)


def _tell(error: MarbleError) -> None:
    if isinstance(error, Interrupted):
        typer.secho(str(error), err=True)
    else:
        label = "stopped" if error.exit_code == 3 else "error"
        typer.secho(f"{label}: {error}", err=True, fg=typer.colors.RED)


if __name__ == "__main__":
    main()
