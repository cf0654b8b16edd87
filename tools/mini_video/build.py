"""Train the mini video pipeline from scratch, and write it in diffusers' format.

    python -m tools.mini_video.build build/mini-video

It takes hours on two CPU cores, and goes on where it was stopped: finished parts stay in the folder, and the one under
way is saved in FOLDER/training now and then. The same recipe gives the same weights on the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

from marble_rl.models.cpu_products import use_onednn
from tools.mini.base import train_base
from tools.mini.training import Bar, Resumable, bars
from tools.mini_video.autoencoder import encode, new_autoencoder, train_autoencoder
from tools.mini_video.base import VideoBase
from tools.mini_video.corpus import Corpus, make_corpus
from tools.mini_video.scenes import SOURCES

SHIFT = 2.0
"""Of the noise levels, towards noise: frames of a clip resemble each other, so that less noise leaves more to see."""


@dataclass(frozen=True)
class Recipe:
    """Data, steps and batch sizes of every part."""

    seed: int = 0
    autoencoder_clips: int = 3_000
    autoencoder_spoilt: float = 0.35
    """Share of clips with a flaw."""
    autoencoder_steps: int = 9_000
    autoencoder_batch: int = 8
    base_clips: int = 12_000
    base_spoilt: float = 0.3
    base_miscaptioned: float = 0.06
    """Share of captions that say something else."""
    threads: int = 1
    """Another number rounds differently and gives other weights."""
    picture_steps: int = 3_000
    """First on the first frames alone, which teaches things, colours and letters at a quarter of the cost."""
    picture_batch: int = 64
    clip_steps: int = 6_000
    clip_batch: int = 32
    motion_sources: tuple[str, ...] = ("motion", "text", "motion", "general")
    """Of the clips: more motion, which is learnt slowest."""


def build(out: Path, recipe: Recipe, console: Console) -> None:
    """Train all parts that are not in ``out`` yet."""
    torch.set_num_threads(recipe.threads)
    use_onednn()
    with bars(console) as bar:
        vae = _autoencoder(out, recipe, bar)
        base = _base(out, recipe, vae, bar)
    save_pipeline(out / "pipeline", vae, base)
    console.print(f"wrote {out / 'pipeline'}")


def _autoencoder(out: Path, recipe: Recipe, bar: Bar) -> Any:
    from diffusers import AutoencoderKLWan

    folder = out / "vae"
    if not folder.exists():
        vae = new_autoencoder(recipe.seed)
        corpus = make_corpus(recipe.autoencoder_clips, recipe.seed, spoilt=recipe.autoencoder_spoilt)
        training = Resumable(out / "training" / "autoencoder.pt", bar("autoencoder", recipe.autoencoder_steps))
        steps, batch = recipe.autoencoder_steps, recipe.autoencoder_batch
        train_autoencoder(vae, corpus.videos, training, steps=steps, batch=batch, seed=recipe.seed)
        vae.save_pretrained(folder)
    return AutoencoderKLWan.from_pretrained(folder).eval()


def _base(out: Path, recipe: Recipe, vae: Any, bar: Bar) -> VideoBase:
    base = VideoBase(recipe.seed)
    latents, captions = _latents(out / "training", recipe, vae)
    for name, x0, steps, batch in (
        ("pictures", latents[:, :, :1], recipe.picture_steps, recipe.picture_batch),
        ("clips", latents, recipe.clip_steps, recipe.clip_batch),
    ):
        training = Resumable(out / "training" / f"{name}.pt", bar(name, steps))
        train_base(base, x0, captions, training, steps=steps, batch=batch, seed=recipe.seed)
    return base


def _latents(folder: Path, recipe: Recipe, vae: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Of the clips that the transformer is trained on; drawn and encoded once."""
    file = folder / "latents.pt"
    if not file.exists():
        corpus = _clips(recipe)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"latents": encode(vae, corpus.videos), "captions": list(corpus.captions)}, file)
    saved = torch.load(file, weights_only=True)
    return saved["latents"], tuple(saved["captions"])


def _clips(recipe: Recipe) -> Corpus:
    sources = (*SOURCES, *recipe.motion_sources)
    spoilt, wrong = recipe.base_spoilt, recipe.base_miscaptioned
    return make_corpus(recipe.base_clips, recipe.seed + 1, spoilt=spoilt, miscaptioned=wrong, sources=sources)


def save_pipeline(out: Path, vae: Any, base: VideoBase) -> None:
    """Write all five components as a `WanPipeline`."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    WanPipeline(
        transformer=base.transformer,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT),
        vae=vae,
        text_encoder=base.text_encoder,
        tokenizer=base.tokenizer,
    ).save_pretrained(out)


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the pipeline and what its training needs.")],
    seed: int = Recipe.seed,
) -> None:
    """Train the mini video pipeline (hours on two CPU cores; Ctrl-C stops, the same command continues)."""
    build(out, Recipe(seed=seed), Console())


if __name__ == "__main__":
    typer.run(main)
