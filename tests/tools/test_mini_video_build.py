"""The builder of the mini video pipeline: plain diffusers opens the result, an interrupted training goes on."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import torch
from rich.console import Console

from marble_rl.models import load_model
from tools.mini.base import train_base
from tools.mini.training import Resumable
from tools.mini_video.autoencoder import LATENT_CHANNELS
from tools.mini_video.base import TEXT_LENGTH, VideoBase, words
from tools.mini_video.build import Recipe, build
from tools.mini_video.scenes import FRAMES, SOURCES, draw_clip


class Interrupted(Exception):
    pass


def test_every_caption_has_a_token_for_each_word_and_fits() -> None:
    dice, base = random.Random(0), VideoBase(0)
    known = set(words())
    for i in range(600):
        caption = draw_clip(SOURCES[i % 3], dice).caption
        assert {word for word in caption.replace(",", "").split() if word.islower()} <= known
        assert len(base.tokenizer(caption).input_ids) <= TEXT_LENGTH


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.mini.training.SAVE_EVERY", 2)
    latents = torch.randn(8, LATENT_CHANNELS, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    captions = ["a red star falls"] * 8

    def trained(base: VideoBase, training: Resumable) -> dict[str, torch.Tensor]:
        train_base(base, latents, captions, training, steps=5, batch=4, seed=0)
        return base.state_dict()

    def interrupt(step: int, loss: float) -> None:
        if step == 3:
            raise Interrupted

    whole = trained(VideoBase(0), Resumable())
    with pytest.raises(Interrupted):
        trained(VideoBase(0), Resumable(tmp_path / "x.pt", interrupt))
    steps: list[int] = []
    continued = trained(VideoBase(1), Resumable(tmp_path / "x.pt", lambda step, loss: steps.append(step)))
    assert steps == [2, 3, 4], "the last complete state was saved after two steps"
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


@pytest.mark.full
def test_plain_diffusers_opens_what_is_built(tmp_path: Path) -> None:
    from diffusers import WanPipeline

    few = {"autoencoder_steps": 2, "picture_steps": 2, "clip_steps": 2}
    small = {"autoencoder_clips": 8, "autoencoder_batch": 4, "base_clips": 8, "picture_batch": 4, "clip_batch": 4}
    build(tmp_path, Recipe(threads=1, **few, **small), Console(file=io.StringIO()))
    pipeline = WanPipeline.from_pretrained(tmp_path / "pipeline")
    size = {"height": 64, "width": 64, "num_frames": FRAMES, "num_inference_steps": 2}
    clip = pipeline("a red star falls", guidance_scale=1.0, max_sequence_length=TEXT_LENGTH, output_type="np", **size)
    assert clip.frames.shape == (1, FRAMES, 64, 64, 3)
    assert load_model(str(tmp_path / "pipeline"), torch.device("cpu")).latent_shape(64, 64, FRAMES) == (
        LATENT_CHANNELS,
        4,
        8,
        8,
    )
