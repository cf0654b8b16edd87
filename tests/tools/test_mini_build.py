"""A few steps of each part of the mini pipeline, and what plain diffusers makes of the result."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from rich.console import Console
from safetensors.torch import load_file

from marble_rl.models.sd3 import SD3Model
from tools.mini.autoencoder import LATENT_CHANNELS, encode, train_autoencoder
from tools.mini.base import TEXT_LENGTH, Base, train_base
from tools.mini.build import Recipe, build
from tools.mini.corpus import make_corpus
from tools.mini.scenes import SOURCES
from tools.mini.tokenizers import clip_tokenizer, t5_tokenizer, words
from tools.mini.training import Resumable

pytestmark = pytest.mark.full  # maintainers' tools, which rarely change

RECIPE = Recipe(
    autoencoder_pictures=12,
    autoencoder_steps=2,
    autoencoder_batch=4,
    base_pictures=12,
    base_steps=2,
    second_steps=2,
    base_batch=4,
    base_threads=1,
    lessons=8,
    samples=4,
    caption_match_steps=2,
    preference_steps=2,
    caption_match_batch=4,
    preference_batch=4,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the pipeline and all reward models."""
    folder = tmp_path_factory.mktemp("mini")
    build(folder, RECIPE, Console(file=io.StringIO()))
    return folder


def test_every_word_is_one_token() -> None:
    clip, t5 = clip_tokenizer(TEXT_LENGTH), t5_tokenizer(TEXT_LENGTH)
    for word in words():
        assert len(clip(word)["input_ids"]) == 3, word
        assert len(t5(word)["input_ids"]) == 2, word


def test_every_caption_fits_and_every_sign_is_told_apart() -> None:
    captions = sorted(set(make_corpus(300, 1).captions))
    clip, t5 = clip_tokenizer(64), t5_tokenizer(64)
    for tokenizer in (clip, t5):
        encoded = [tuple(tokenizer(caption)["input_ids"]) for caption in captions]
        assert max(map(len, encoded)) <= TEXT_LENGTH
        assert len(set(encoded)) == len(captions)
        unknown = tokenizer.unk_token_id
        assert all(unknown not in ids[:-1] for ids in encoded)


def test_corpus_is_seeded_and_spoilt_as_asked() -> None:
    clean, again, spoilt = make_corpus(30, 3), make_corpus(30, 3), make_corpus(30, 3, spoilt=1.0, miscaptioned=0.5)
    assert np.array_equal(clean.images, again.images)
    assert clean.captions == again.captions
    assert [s.source for s in clean.scenes] == list(SOURCES) * 10
    assert all(caption == scene.caption for caption, scene in zip(clean.captions, clean.scenes, strict=True))
    wrong = sum(caption != scene.caption for caption, scene in zip(spoilt.captions, spoilt.scenes, strict=True))
    assert 5 <= wrong <= 25


def test_building_again_gives_the_same_weights(built: Path, tmp_path: Path) -> None:
    build(tmp_path, RECIPE, Console(file=io.StringIO()))
    files = sorted(file.relative_to(built) for file in built.rglob("*.safetensors"))
    assert len(files) == 10  # transformer, VAE, three text encoders; four reward models, of which one has a head
    for file in files:
        one, two = load_file(built / file), load_file(tmp_path / file)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_parts_that_exist_are_kept(built: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in built.rglob("*.safetensors")}
    build(built, RECIPE, Console(file=io.StringIO()))
    assert {file: file.stat().st_mtime_ns for file in built.rglob("*.safetensors")} == before


def test_plain_diffusers_opens_it_and_samples(built: Path) -> None:
    pipeline = StableDiffusion3Pipeline.from_pretrained(built / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline("a red marble", num_inference_steps=2, guidance_scale=1.0, output_type="np").images
    assert images.shape == (1, 64, 64, 3)


def test_training_and_pipeline_condition_alike(built: Path) -> None:
    """The velocity that was trained is the one that the pipeline's own text path gives."""
    model = SD3Model.load(str(built / "pipeline"), torch.device("cpu"))
    base = Base(seed=0)
    base.transformer.load_state_dict(model.transformer.state_dict())
    encoders = (model.pipeline.text_encoder, model.pipeline.text_encoder_2)
    for clip, encoder in zip(base.clips, encoders, strict=True):
        clip.model.load_state_dict(encoder.state_dict())
    base.t5.model.load_state_dict(model.pipeline.text_encoder_3.state_dict())
    base.eval()
    captions = ['a blue sign that says "K7"', "two red stars in the snow, at night"]
    x, sigma = (
        torch.randn(2, LATENT_CHANNELS, 16, 16, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0.2, 0.9]),
    )
    with torch.no_grad():
        ours = base.velocity(x, sigma, base.tokens(captions))
        theirs = model.velocity(x, sigma, model.encode(captions))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_autoencoder_learns() -> None:
    images = make_corpus(12, 0).images
    losses: list[float] = []
    vae = train_autoencoder(images, steps=12, batch=4, seed=0, on_step=lambda step, loss: losses.append(loss))
    assert losses[-1] < 0.8 * losses[0]
    latents = encode(vae, images)
    assert latents.shape == (12, LATENT_CHANNELS, 16, 16)
    assert float(latents.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(latents.std()) == pytest.approx(1.0, abs=0.05)


def test_the_base_learns() -> None:
    latents = torch.randn(8, LATENT_CHANNELS, 16, 16, generator=torch.Generator().manual_seed(0))
    losses: list[float] = []
    captions = make_corpus(8, 0).captions
    training = Resumable(on_step=lambda step, loss: losses.append(loss))
    train_base(Base(0), latents, captions, training, steps=12, batch=8, seed=0)
    assert sum(losses[-3:]) < sum(losses[:3])
