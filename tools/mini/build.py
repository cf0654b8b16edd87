"""Train the mini pipeline and its reward models from scratch, and write them in diffusers' and transformers' formats.

    python -m tools.mini.build build/mini

The same recipe gives the same weights on the same machine. Parts that are already in the folder are kept: delete one to
train it again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from marble_rl.mini.shapes import SIZE
from marble_rl.storage import save_safetensors
from tools.mini.autoencoder import encode, train_autoencoder
from tools.mini.base import Base, train_base
from tools.mini.corpus import Pictures, make_corpus
from tools.mini.scenes import SOURCES
from tools.mini.scorers import (
    TEXT_LENGTH,
    make_lessons,
    train_aesthetic,
    train_caption_match,
    train_preference,
    with_further_flaws,
)
from tools.mini.tokenizers import clip_tokenizer
from tools.mini.training import Bar, Resumable, bars

SHIFT = 1.0
"""At 64 latent tokens the noise schedule needs no shift towards noise."""
SAMPLING_STEPS = 8


@dataclass(frozen=True)
class Recipe:
    """Data, steps and batch sizes of every part."""

    seed: int = 0
    autoencoder_pictures: int = 6_000
    autoencoder_spoilt: float = 0.35
    """Share of blurred, pale or crooked pictures."""
    autoencoder_steps: int = 4_000
    autoencoder_batch: int = 32
    base_pictures: int = 16_000
    base_spoilt: float = 0.3
    base_miscaptioned: float = 0.06
    """Share of captions that belong to another picture."""
    base_threads: int = 2
    """More than one, because this part takes longest. Another number rounds differently and gives other weights."""
    base_steps: int = 4_500
    second_sources: tuple[str, ...] = ("composition", "composition", "text", "composition", "general")
    """Sources of a second phase with as many new pictures. It has more compositions, because the model learns slowest
    which of two objects has which colour."""
    second_steps: int = 4_000
    base_batch: int = 64
    lessons: int = 9_000
    """Number of captions with right, wrong and flawed pictures, for the reward models."""
    samples: int = 3_000
    """Number of pictures sampled from the base model, for the reward models."""
    caption_match_steps: int = 4_000
    caption_match_batch: int = 32
    preference_steps: int = 1_000
    preference_batch: int = 16


def build(out: Path, recipe: Recipe, console: Console) -> None:
    """Train all parts that are not in ``out`` yet."""
    with bars(console) as bar:
        if not (out / "pipeline").exists():
            _build_pipeline(out / "pipeline", recipe, bar)
        _build_scorers(out, recipe, bar)
    console.print(f"wrote {out}")


def _build_pipeline(folder: Path, recipe: Recipe, bar: Bar) -> None:
    vae = train_autoencoder(
        make_corpus(recipe.autoencoder_pictures, recipe.seed, spoilt=recipe.autoencoder_spoilt).images,
        steps=recipe.autoencoder_steps,
        batch=recipe.autoencoder_batch,
        seed=recipe.seed,
        on_step=bar("autoencoder", recipe.autoencoder_steps),
    )
    base = Base(recipe.seed)
    phases = ((SOURCES, recipe.base_steps), (recipe.second_sources, recipe.second_steps))
    for seed, (sources, steps) in enumerate(phases, start=recipe.seed):
        corpus = make_corpus(
            recipe.base_pictures,
            seed,
            spoilt=recipe.base_spoilt,
            miscaptioned=recipe.base_miscaptioned,
            sources=sources,
        )
        with _threads(recipe.base_threads):
            train_base(
                base,
                encode(vae, corpus.images),
                corpus.captions,
                Resumable(on_step=bar("transformer", steps)),
                steps=steps,
                batch=recipe.base_batch,
                seed=seed,
            )
    save_pipeline(folder, vae, base)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build_scorers(out: Path, recipe: Recipe, bar: Bar) -> None:
    from transformers import CLIPModel

    lessons = make_lessons(recipe.lessons, recipe.seed)
    steps, batch = recipe.preference_steps, recipe.preference_batch
    if not (out / "clipscore").exists():
        on_step = bar("clipscore", recipe.caption_match_steps)
        clip = train_caption_match(
            lessons,
            steps=recipe.caption_match_steps,
            batch=recipe.caption_match_batch,
            seed=recipe.seed,
            on_step=on_step,
        )
        save_scorer(out / "clipscore", clip)
    clip = CLIPModel.from_pretrained(out / "clipscore")
    samples = with_further_flaws(draw(out / "pipeline", lessons.captions[: recipe.samples], recipe.seed), recipe.seed)
    for name, content in (("pickscore", True), ("hpsv2", False)):
        if not (out / name).exists():
            on_step = bar(name, steps)
            scorer = train_preference(
                clip, lessons, samples, content=content, steps=steps, batch=batch, seed=recipe.seed, on_step=on_step
            )
            save_scorer(out / name, scorer)
    if not (out / "aesthetic").exists():
        # Evaluation-only, so it must not be trained on the lessons of the other rewards.
        seed = recipe.seed + 1
        other = make_lessons(recipe.lessons, seed)
        drawn = with_further_flaws(draw(out / "pipeline", other.captions[: recipe.samples], seed), seed)
        on_step = bar("aesthetic", steps)
        judge = train_aesthetic(clip, other, drawn, steps=steps, batch=batch, seed=seed, on_step=on_step)
        save_scorer(out / "aesthetic", judge.scorer.clip, head=judge.layers)


def draw(pipeline: Path, captions: Sequence[str], seed: int, batch: int = 50) -> Pictures:
    """Sample one picture for each caption from the pipeline."""
    from marble_rl.models import load_model
    from marble_rl.models.base import PromptCache
    from marble_rl.rollout.rollout import sample
    from marble_rl.seeding import generator, normal_rows

    model = load_model(str(pipeline), torch.device("cpu"))
    prompts = PromptCache(model)
    shape = model.latent_shape(SIZE, SIZE)
    sigmas = model.sigmas(SAMPLING_STEPS, shape)
    drawn = []
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        noise = normal_rows((generator(seed, "draw", start + i) for i in range(len(part))), shape)
        drawn.append(sample(model, noise, prompts.encode(part), sigmas, "dpm2")[1])
    return torch.cat(drawn).numpy()


def save_pipeline(out: Path, vae: torch.nn.Module, base: Base) -> None:
    """Write all nine components as a `StableDiffusion3Pipeline`."""
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


def save_scorer(out: Path, clip: Any, head: torch.nn.Module | None = None) -> None:
    """Write a CLIP model with tokenizer and image processor; the folder appears only when it is complete."""
    from transformers import CLIPImageProcessor

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        clip.save_pretrained(folder)
        clip_tokenizer(TEXT_LENGTH).save_pretrained(folder)
        half = [0.5, 0.5, 0.5]
        CLIPImageProcessor(
            size={"shortest_edge": SIZE}, crop_size=SIZE, image_mean=half, image_std=half
        ).save_pretrained(folder)
        if head is not None:
            save_safetensors(folder / "head.safetensors", {f"layers.{k}": v for k, v in head.state_dict().items()}, {})
        folder.rename(out)


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the pipeline and the reward models.")],
    seed: int = Recipe.seed,
) -> None:
    """Train the mini pipeline and its reward models (hours on two CPU cores)."""
    torch.set_num_threads(1)
    build(out, Recipe(seed=seed), Console())


if __name__ == "__main__":
    typer.run(main)
