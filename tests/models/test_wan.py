"""Wan 2.1 against diffusers' own pipeline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

import families
from families import WAN
from marble_rl.errors import InputError
from marble_rl.models import load_model
from marble_rl.models.wan import WanConditioning, WanModel
from tools.tiny import build_tiny_wan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-wan"
    build_tiny_wan(folder)
    return folder


@pytest.fixture
def model(folder: Path) -> WanModel:
    return WAN.load(folder)


def test_encoding_is_the_pipelines(model: WanModel) -> None:
    ours = model.encode(families.PROMPTS)
    embeds, _ = model.pipeline.encode_prompt(
        families.PROMPTS, do_classifier_free_guidance=False, max_sequence_length=16
    )
    assert isinstance(ours, WanConditioning)
    assert torch.equal(ours.prompt_embeds, embeds)


def test_sigmas_are_those_of_the_pipelines_scheduler(model: WanModel) -> None:
    sigmas = model.sigmas(7, (4, 2, 4, 4))
    model.pipeline.scheduler.set_timesteps(7)
    assert torch.equal(sigmas, model.pipeline.scheduler.sigmas)
    assert (sigmas[:-1] * 1000).int().tolist() == model.pipeline.scheduler.timesteps.tolist()


def test_levels_that_are_not_of_flow_matching_are_refused(model: WanModel) -> None:
    model.pipeline.scheduler = UniPCMultistepScheduler()
    with pytest.raises(InputError, match="UniPCMultistepScheduler do not fall from 1 to 0"):
        model.sigmas(7, (4, 2, 4, 4))


def test_samples_are_those_of_plain_diffusers(folder: Path) -> None:
    families.assert_samples_are_those_of_plain_diffusers(WAN, folder)


def test_a_seed_gives_the_video_of_plain_diffusers(folder: Path) -> None:
    families.assert_a_seed_gives_the_image_of_plain_diffusers(WAN, folder)


def test_samples_with_an_euler_scheduler_in_the_folder(folder: Path, tmp_path: Path) -> None:
    """Nothing of the plain pipeline is changed here."""
    shutil.copytree(folder, tmp_path / "euler")
    shutil.rmtree(tmp_path / "euler" / "scheduler")
    FlowMatchEulerDiscreteScheduler(shift=5.0).save_pretrained(tmp_path / "euler" / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (tmp_path / "euler" / "model_index.json").write_text(json.dumps(index))
    unchanged = families.Family(text_length=16, frames=5)
    families.assert_samples_are_those_of_plain_diffusers(unchanged, tmp_path / "euler")


@pytest.mark.full
def test_exported_lora(folder: Path, tmp_path: Path) -> None:
    families.assert_exported_lora_is_that_of_plain_diffusers(WAN, folder, tmp_path)


def test_the_readme_of_an_export_runs(folder: Path, tmp_path: Path) -> None:
    families.assert_the_readme_of_an_export_runs(WAN, folder, tmp_path)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_gradients(folder: Path, checkpointing: bool) -> None:
    families.assert_fused_gradients_are_those_of_one_pass_each(WAN, folder, checkpointing)


def test_what_it_refuses(folder: Path, model: WanModel) -> None:
    with pytest.raises(InputError, match="height: 12 is not a multiple of 8"):
        model.latent_shape(12, 16, 5)
    with pytest.raises(InputError, match=r"frames: 6 is not 1 more than a multiple of 4.*use 5 or 9"):
        model.latent_shape(16, 16, 6)
    with pytest.raises(InputError, match=r"model\.guidance: 3\.5 given, but Wan takes no guidance"):
        WAN.load(folder, guidance=3.5)
    assert model.latent_shape(16, 16, 1) == (4, 1, 4, 4)
    assert model.latent_shape(None, None) == (4, 21, 120, 208)


def test_pipelines_that_cannot_be_used_are_refused_before_they_are_loaded(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"boundary_ratio": 0.9}))
    with pytest.raises(InputError, match=r"its model_index\.json has no transformer_2"):
        load_model(str(tmp_path), torch.device("cpu"))
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "WanImageToVideoPipeline"}))
    with pytest.raises(InputError, match=r"WanImageToVideoPipeline is not supported: it needs a picture to begin with"):
        load_model(str(tmp_path), torch.device("cpu"))
