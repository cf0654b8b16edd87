"""`marble sample`, `evaluate` and `export`: what to do with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from marble_rl.cli.shared import AsJson, CheckpointName, Device, Overrides, RunPath, print_json, quiet_libraries
from marble_rl.distributed.world import join
from marble_rl.errors import InputError

if TYPE_CHECKING:
    from marble_rl.config import RunConfig

Target = Annotated[str, typer.Argument(metavar="RUN|LORA|MODEL", help="Run, exported LoRA, or pipeline.")]
BaseModel = Annotated[str | None, typer.Option(help="Base model of a LoRA that does not name it.")]
Side = Annotated[int | None, typer.Option(min=8, help="Default: the run's, or the model's.")]
SampledWeights = Annotated[
    list[str] | None,
    typer.Option(
        help="May be repeated. Of a run: ema (the default), default (as trained last), old (sampling policy) or base. "
        "Of a LoRA: given (the default) or base."
    ),
]
SaveImages = Annotated[
    bool, typer.Option("--save-images", help="Keep a picture of every prompt, for the gallery of marble report.")
]
LARGEST_SEED = 2**63 - 1
"""torch accepts seeds up to twice that, so seed + i stays valid."""


def sample(
    target: Target,
    prompt: Annotated[str | None, typer.Option(help="What to draw. This or --prompts.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of prompts, one a line (docs/prompts.md).")
    ] = None,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Also write grid.png or grid.webp: a row per prompt, a column per --weights."),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for PNG files, or WebP for videos. Or one file: .png, .jpg, .webp; of a video .mp4, .gif, "
            ".webp. Existing files are kept; new ones get a number."
        ),
    ] = Path("samples"),
    images: Annotated[int, typer.Option(min=1, help="How many of each prompt; image i uses seed + i.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the first image.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps. Default: the run's, or 40.")] = None,
    solver: Annotated[
        Literal["euler", "dpm2"] | None, typer.Option(help="ODE solver. Default: the run's, or euler.")
    ] = None,
    height: Side = None,
    width: Side = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Of a video. Default: the run's, or the model's.")] = None,
    fps: Annotated[
        int | None, typer.Option(min=1, help="Frames per second of a video. Default: the run's logging.fps.")
    ] = None,
    weights: SampledWeights = None,
    checkpoint: CheckpointName = None,
    model: BaseModel = None,
    device: Device = "auto",
) -> None:
    """Sample images. The same arguments give the same images.

    Prompts from a file, base model against trained one: --prompts FILE --weights base --weights ema --grid.

    With --solver euler they equal those of plain diffusers, called as in the export's README.md (Wan: similar, not
    equal).
    """
    texts = _sampled_prompts(prompt, prompts)
    quiet_libraries()
    from marble_rl.inference.opening import choose_weights, chosen_step, model_config, open_target
    from marble_rl.inference.sampling import Sampling, check_file, is_file, save_samples
    from marble_rl.storage import output_folder

    chosen = [choose_weights(target, name) for name in dict.fromkeys(weights or [])] or [choose_weights(target)]
    if is_file(out):
        check_file(out, model_config(target, model).path, len(texts) * images * len(chosen) + grid)
    with output_folder(out.parent if is_file(out) else out):
        opened = open_target(target, model_path=model, step=chosen_step(target, checkpoint), device=device)
        how = Sampling(seed, images, steps, solver, height, width, frames, fps)
        for file in save_samples(opened, texts, chosen, how, out, numbered=prompts is not None, grid=grid):
            typer.echo(file)


def evaluate(
    target: Target,
    config: Annotated[
        Path | None,
        typer.Option(help="Config with prompts and rewards, and settings of a MODEL; needed unless given a run."),
    ] = None,
    overrides: Overrides = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="May be repeated. Of a run: base, ema, default, old (default: base, ema). "
            "Of a LoRA: base, given (default: given)."
        ),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to use instead of the config's held-out ones.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Images per prompt.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the evaluation.")] = None,
    checkpoint: CheckpointName = None,
    save_images: SaveImages = False,
    out: Annotated[Path | None, typer.Option(help="Folder for scores and grids. Default: RUN/evaluation.")] = None,
    model: BaseModel = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda, cuda:N, xpu or mps. Default: auto, or what --config says of a MODEL."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score held-out prompts with every reward, seeded image by image."""
    changes = [*(overrides or []), "lora.init=null"]  # the LoRA that a run started from is no longer needed
    changes += [] if images is None else [f"evaluation.images_per_prompt={images}"]
    changes += [] if seed is None else [f"evaluation.seed={seed}"]
    world = join()
    with world.failing_together():
        settings = _evaluation_settings(target, config, changes)
    quiet_libraries()
    from marble_rl.evaluation.report import evaluate_target, print_scores
    from marble_rl.inference.opening import choose_weights, chosen_step, kind_of

    with world.failing_together():
        is_run = kind_of(target) == "run"
        asked = weights or (["base", "ema"] if is_run else ["given"])
        folder = out or (Path(target) / "evaluation" if is_run else Path("evaluation"))
        scores = evaluate_target(
            target,
            settings,
            [choose_weights(target, name) for name in asked],
            prompts_file=prompts,
            model_path=model,
            step=chosen_step(target, checkpoint),
            device=device or ("auto" if is_run else settings.model.device),
            out=folder,
            world=world,
            save_images=save_images,
        )
    if not world.first:
        return
    if as_json:
        print_json(scores.to_json())
    else:
        print_scores(scores, folder)


def export(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="New folder for the LoRA, or the pipeline.")],
    weights: Annotated[
        Literal["ema", "default", "old"], typer.Option(help="default: as trained last; old: the sampling policy.")
    ] = "ema",
    checkpoint: CheckpointName = None,
    layout: Annotated[
        Literal["diffusers", "comfyui", "kohya"],
        typer.Option("--format", help="Of the LoRA: for which program (docs/exporting.md)."),
    ] = "diffusers",
    merged: Annotated[bool, typer.Option("--merged", help="The whole pipeline with the LoRA in its weights.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Precision of merged weights.")
    ] = "float32",
) -> None:
    """Write a LoRA for plain diffusers' `load_lora_weights` or another program, or a merged pipeline.

    With a README.md for the hub: what it was trained on, its scores (if RUN was evaluated), how to call it.
    """
    from marble_rl.runs.folder import RunFolder
    from marble_rl.storage import output_folder

    folder = RunFolder(run)
    folder.load_config()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError(f"--out: {out} is not empty; give another folder")
    if merged and layout != "diffusers":
        raise InputError(
            f"--format: {layout!r} given with --merged, a pipeline in diffusers' format; leave one of them out"
        )
    quiet_libraries()
    import torch

    from marble_rl.inference.export import export_lora, export_merged
    from marble_rl.inference.opening import chosen_step, open_target, open_without_weights

    step = chosen_step(str(run), checkpoint)
    with output_folder(out):
        if merged:
            opened = open_target(str(run), step=step, device="cpu", plain=True)
            remarks = export_merged(opened, weights, out, folder, getattr(torch, dtype))
        else:
            opened = open_without_weights(run, step)
            remarks = export_lora(opened, weights, out, folder, layout)
    for remark in remarks:
        typer.secho(remark, err=True)
    opener = f"{opened.model.plain_call()[0]}.from_pretrained" if merged else "pipe.load_lora_weights"
    how = f"open it with {opener}({str(out)!r})" if layout == "diffusers" else f"{out / 'README.md'} says how to use it"
    typer.echo(f"wrote {out}; {how}")


def _sampled_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The text of --prompt, or those in the file of --prompts."""
    from marble_rl.prompts import read_prompt_file

    if file is not None and prompt is None:
        return [read.text for read in read_prompt_file(file).prompts]
    if prompt is None or file is not None:
        given = "neither" if prompt is None else "both"
        raise InputError(f"--prompt, --prompts: {given} given; give one of them, --prompt TEXT or --prompts FILE")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError(f"--prompt: {prompt!r} has bytes that are not UTF-8; give it in that encoding") from None
    return [prompt]


def _evaluation_settings(target: str, config: Path | None, changes: list[str]) -> RunConfig:
    """The config to evaluate with: ``config``, or the run's own. The model section is always the run's, if the target
    is a run. Overrides (``changes``) of settings that the target defines itself are refused."""
    from marble_rl.config import load_config
    from marble_rl.inference.opening import kind_of, own_settings
    from marble_rl.runs.folder import RunFolder

    kind, folder = kind_of(target), RunFolder(Path(target))
    if config is None and kind != "run":
        raise InputError(f"--config: {target} is not a run folder; give a config with the prompts and rewards to use")
    of_model = [change for change in changes if change.partition("=")[0].split(".")[0] == "model"]
    fixed = {f"model.{key}" for key in own_settings(target)}
    fixes = {"model.path": "give --model for a LoRA, or another target", "model.device": "give --device"}
    for change in of_model:
        key = change.partition("=")[0]
        if key == "model" or key in fixed or (key == "model.device" and kind == "run"):
            fix = fixes.get(key, "leave it out")
            raise InputError(f"--set {change!r}: {target}, a {kind}, is evaluated with its own {key}; {fix}")
    if config is None:
        return folder.load_config(changes)
    settings = load_config(config, changes)
    return settings if kind != "run" else settings.model_copy(update={"model": folder.load_config(of_model).model})
