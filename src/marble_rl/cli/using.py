"""`marble sample`, `evaluate` and `export`: what to do with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marble_rl.cli.shared import AsJson, Device, Overrides, RunCheckpoint, RunPath, print_json, quiet_libraries
from marble_rl.distributed import join
from marble_rl.errors import InputError

if TYPE_CHECKING:
    from marble_rl.models.lora import Role

Target = Annotated[str, typer.Argument(metavar="RUN|LORA|MODEL", help="Run, exported LoRA, or pipeline.")]
TargetCheckpoint = Annotated[int | None, typer.Option(help="Which checkpoint of a run. Default: the newest.")]
BaseModel = Annotated[str | None, typer.Option(help="Base model of a LoRA that does not name it.")]
Side = Annotated[int | None, typer.Option(min=8, help="Default: the run's, or the model's.")]
Weights = Annotated[str, typer.Option(help="ema, default (as trained last), old (sampling policy) or base.")]


def sample(
    target: Target,
    prompt: Annotated[str, typer.Option(help="What to draw.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNG files, or WebP for videos.")] = Path("samples"),
    images: Annotated[int, typer.Option(min=1, help="How many; image i uses seed + i.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first image.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps. Default: the run's, or 40.")] = None,
    solver: Annotated[str | None, typer.Option(help="euler or dpm2. Default: the run's, or euler.")] = None,
    height: Side = None,
    width: Side = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Of a video. Default: the run's, or the model's.")] = None,
    weights: Weights = "ema",
    step: TargetCheckpoint = None,
    model: BaseModel = None,
    device: Device = "auto",
) -> None:
    """Draw images. The same arguments give the same images as plain diffusers with guidance_scale=1."""
    role = _role(weights)
    if solver not in (None, "euler", "dpm2"):
        raise InputError(f"--solver: unknown solver {solver!r}; use euler or dpm2")
    quiet_libraries()
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


def evaluate(
    target: Target,
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
    step: TargetCheckpoint = None,
    out: Annotated[Path | None, typer.Option(help="Folder for scores and grids. Default: RUN/evaluation.")] = None,
    model: BaseModel = None,
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
    quiet_libraries()
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
        print_json(report.to_json())
    else:
        report.print()


def export(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="New folder for the LoRA, or the pipeline.")],
    weights: Weights = "ema",
    step: RunCheckpoint = None,
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
    quiet_libraries()
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


def _role(weights: str) -> Role:
    """The value of --weights, if it names weights of a run."""
    roles: tuple[Role, ...] = ("ema", "default", "old", "base")
    for role in roles:
        if role == weights:
            return role
    raise InputError(f"--weights: unknown weights {weights!r}; use one of {', '.join(roles)}")
