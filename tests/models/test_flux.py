"""FLUX.1 against diffusers' own pipeline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import families
from families import FLUX
from marble_rl.errors import InputError
from marble_rl.models import check_model_settings, flux
from marble_rl.models.flux import FluxConditioning, FluxModel
from marble_rl.models.packing import pack, unpack
from tools.tiny import build_tiny_flux


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-flux"
    build_tiny_flux(folder)
    return folder


@pytest.fixture
def model(folder: Path) -> FluxModel:
    return FLUX.load(folder)


def test_encoding_is_the_pipelines(model: FluxModel) -> None:
    ours = model.encode(families.PROMPTS)
    embeds, pooled, _ = model.pipeline.encode_prompt(families.PROMPTS, max_sequence_length=16)
    assert isinstance(ours, FluxConditioning)
    assert torch.equal(ours.prompt_embeds, embeds)
    assert torch.equal(ours.pooled, pooled)
    assert not torch.allclose(ours.pooled[0], ours.pooled[1])


def test_packing_is_the_pipelines_and_can_be_undone() -> None:
    latents = torch.randn(2, 3, 4, 6)
    assert torch.equal(pack(latents), FLUX.pack(latents))
    assert torch.equal(unpack(pack(latents), 4, 6), latents)


def test_sigmas_are_shifted_by_the_size_of_the_image(model: FluxModel) -> None:
    small, large = (model.sigmas(4, model.latent_shape(size, size)) for size in (16, 256))
    assert (large[1:-1] > small[1:-1]).all()


def test_the_page_on_adding_a_model_gives_this_file() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith("FAMILIES")]
    head = "class FluxModel(DiffusionModel):"
    first = lines.index(head)
    joined = lines[: first + 1] + [line for line in lines[first + 1 :] if line != head]
    assert joined == [line for line in Path(flux.__file__).read_text(encoding="utf-8").splitlines() if line]


def test_samples_are_those_of_plain_diffusers(folder: Path) -> None:
    families.assert_samples_are_those_of_plain_diffusers(FLUX, folder)


def test_a_seed_gives_the_image_of_plain_diffusers(folder: Path) -> None:
    families.assert_a_seed_gives_the_image_of_plain_diffusers(FLUX, folder)


@pytest.mark.full
def test_exported_lora(folder: Path, tmp_path: Path) -> None:
    families.assert_exported_lora_is_that_of_plain_diffusers(FLUX, folder, tmp_path)


def test_the_readme_of_an_export_runs(folder: Path, tmp_path: Path) -> None:
    families.assert_the_readme_of_an_export_runs(FLUX, folder, tmp_path)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_gradients(folder: Path, checkpointing: bool) -> None:
    families.assert_fused_gradients_are_those_of_one_pass_each(FLUX, folder, checkpointing)


def test_guidance_is_an_input_of_the_transformer(folder: Path, model: FluxModel) -> None:
    other = FLUX.load(folder, guidance=1.5)
    assert model.plain_call() == ("FluxPipeline", {"guidance_scale": 3.5, "max_sequence_length": 16})
    assert other.plain_call()[1]["guidance_scale"] == 1.5
    x0, _ = FLUX.ours(other)
    assert not torch.allclose(x0, FLUX.ours(model)[0], atol=1e-3)
    theirs = FLUX.theirs(FLUX.plain(folder, other), other, "latent")
    torch.testing.assert_close(FLUX.pack(x0), theirs, atol=1e-4, rtol=0)


def test_a_flux_without_guidance(tmp_path: Path) -> None:
    """As FLUX.1-schnell is."""
    build_tiny_flux(tmp_path / "schnell", guidance_embeds=False)
    families.assert_samples_are_those_of_plain_diffusers(FLUX, tmp_path / "schnell")
    with pytest.raises(InputError, match=r"model\.guidance: 2\.0 given.*schnell"):
        FLUX.load(tmp_path / "schnell", guidance=2.0)


def test_what_it_refuses(folder: Path, model: FluxModel) -> None:
    with pytest.raises(InputError, match="height: 18 is not a multiple of 4"):
        model.latent_shape(18, 16)
    with pytest.raises(InputError, match=r"rollout\.frames: 5 given, but FLUX\.1 makes images"):
        model.latent_shape(16, 16, 5)
    with pytest.raises(InputError, match=r"rollout\.frames: 5 given, but FLUX\.1 makes images"):
        check_model_settings(str(folder), frames=5)
    with pytest.raises(InputError, match=r"model\.text_length: 600 is more than the 512 that FLUX\.1 takes"):
        check_model_settings(str(folder), text_length=600)
    check_model_settings(str(folder), guidance=2.0)
    assert model.latent_shape(None, 8) == (4, 128, 4)
