"""`marble train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marble_rl.cli.shared import AsJson, ConfigPath, Overrides, print_json, quiet_libraries
from marble_rl.distributed.world import join
from marble_rl.errors import count_of

if TYPE_CHECKING:
    from marble_rl.runs.folder import StartMode


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/ and the config's name.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Continue the run in the folder, or start one if there is none.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a LoRA on all rewards of CONFIG at once.

    Ctrl-C finishes the current step, saves and stops; `marble train RUN --resume` continues as if nothing had happened.
    Several GPUs: `OMP_NUM_THREADS=8 torchrun --standalone --nproc-per-node 8 -m marble_rl.cli train CONFIG`
    (docs/distributed.md).
    """
    from marble_rl.config import load_config
    from marble_rl.config.recipes import find_config

    mode: StartMode = "resume_or_start" if resume_or_start else "resume" if resume else "new"
    world = join()
    with world.failing_together():
        file = find_config(config)
        run = load_config(file, overrides or [])
    folder = out or (config if file.parent == config else Path("runs") / file.stem)
    quiet_libraries()
    from rich.console import Console

    from marble_rl.training.summary import print_summary
    from marble_rl.training.trainer import Trainer

    trainer = Trainer(run, folder, mode=mode, world=world)
    result = trainer.train()
    if not world.first:
        return
    if as_json:
        print_json(
            {
                "out": str(result.out),
                "steps": result.steps,
                "lora": str(result.lora),
                "metrics": result.metrics,
            }
        )
    else:
        print_summary(Console(), trainer.folder.metrics, run.trained_rewards)
        typer.echo(
            f"\nDone: {count_of(result.steps, 'step')}. LoRA for plain diffusers: {result.out / result.lora.name}\n\n"
            f"  marble sample {result.out} --prompt 'a prompt'\n"
            f"  marble evaluate {result.out}\n"
            f"  marble report {result.out}\n"
            f"  marble export {result.out} --out my-lora"
        )
