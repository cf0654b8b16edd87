"""Train the mini pipeline from nothing and write it in diffusers' folder format.

    python -m marble_rl.mini.build build/mini

The same recipe gives the same weights on the same machine (with one torch thread).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from marble_rl.mini.autoencoder import encode, train_autoencoder
from marble_rl.mini.base import Base, train_base
from marble_rl.mini.corpus import make_corpus

SHIFT = 1.0
"""At 64 latent tokens the noise schedule needs no shift towards noise."""


@dataclass(frozen=True)
class Recipe:
    """What is trained, on how much, for how long."""

    pictures: int = 24_000
    spoilt: float = 0.35
    """Share of blurred, pale or crooked pictures."""
    miscaptioned: float = 0.1
    """Share of captions that belong to another picture."""
    autoencoder_steps: int = 4000
    autoencoder_batch: int = 32
    base_steps: int = 7000
    base_batch: int = 64
    seed: int = 0


def build(out: Path, recipe: Recipe, console: Console) -> None:
    """Corpus, autoencoder, transformer with text encoders; then the pipeline folder."""
    with Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    ) as progress:
        console.print(f"drawing {recipe.pictures} pictures")
        corpus = make_corpus(recipe.pictures, recipe.seed, spoilt=recipe.spoilt, miscaptioned=recipe.miscaptioned)
        first = progress.add_task("autoencoder", total=recipe.autoencoder_steps, loss="")
        vae = train_autoencoder(
            corpus.images,
            steps=recipe.autoencoder_steps,
            batch=recipe.autoencoder_batch,
            seed=recipe.seed,
            on_step=lambda step, loss: progress.update(first, completed=step + 1, loss=f"loss {loss:.4f}"),
        )
        latents = encode(vae, corpus.images)
        second = progress.add_task("transformer", total=recipe.base_steps, loss="")
        base = train_base(
            latents,
            corpus.captions,
            steps=recipe.base_steps,
            batch=recipe.base_batch,
            seed=recipe.seed,
            on_step=lambda step, loss: progress.update(second, completed=step + 1, loss=f"loss {loss:.4f}"),
        )
    save_pipeline(out, vae, base)
    console.print(f"wrote {out}")


def save_pipeline(out: Path, vae: torch.nn.Module, base: Base) -> None:
    """All nine components as a `StableDiffusion3Pipeline`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    first, second = base.clips
    StableDiffusion3Pipeline(
        transformer=base.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=first.model,
        tokenizer=first.tokenizer,
        text_encoder_2=second.model,
        tokenizer_2=second.tokenizer,
        text_encoder_3=base.t5.model,
        tokenizer_3=base.t5.tokenizer,
    ).save_pretrained(out)


def main(
    out: Annotated[Path, typer.Argument(help="New folder for the pipeline.")],
    pictures: int = Recipe.pictures,
    autoencoder_steps: int = Recipe.autoencoder_steps,
    base_steps: int = Recipe.base_steps,
    seed: int = Recipe.seed,
) -> None:
    """Train the mini pipeline (about two hours on one CPU core)."""
    torch.set_num_threads(1)
    recipe = Recipe(pictures=pictures, autoencoder_steps=autoencoder_steps, base_steps=base_steps, seed=seed)
    build(out, recipe, Console())


if __name__ == "__main__":
    typer.run(main)
