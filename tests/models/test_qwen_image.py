"""Qwen-Image against diffusers' own pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import families
from families import QWEN
from marble_rl.errors import InputError
from marble_rl.models.base import PromptCache
from marble_rl.models.qwen_image import QwenImageConditioning, QwenImageModel
from tools.tiny import build_tiny_qwen_image

LENGTH = QWEN.text_length


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen-image"
    build_tiny_qwen_image(folder)
    return folder


@pytest.fixture
def model(folder: Path) -> QwenImageModel:
    return QWEN.load(folder)


def test_the_tiny_tokenizer_drops_what_the_real_one_drops(model: QwenImageModel) -> None:
    """Otherwise a part of the template would stand for the prompt."""
    pipeline = model.pipeline
    before, after = pipeline.prompt_template_encode.split("{}")
    assert len(pipeline.tokenizer(before).input_ids) == pipeline.prompt_template_encode_start_idx
    assert len(pipeline.tokenizer(after).input_ids) == 5


def test_encoding_is_the_pipelines_padded_to_one_length(model: QwenImageModel) -> None:
    ours = PromptCache(model).encode(families.PROMPTS)
    assert isinstance(ours, QwenImageConditioning)
    embeds, mask = model.pipeline.encode_prompt(families.PROMPTS, max_sequence_length=LENGTH)
    longest = embeds.shape[1]
    own = [len(model.pipeline.tokenizer(text).input_ids) for text in families.PROMPTS]
    assert mask.sum(1).tolist() == [length + 5 for length in own]
    assert own[0] < own[1]
    assert ours.prompt_embeds.shape[1] == LENGTH > longest
    torch.testing.assert_close(ours.prompt_embeds[:, :longest], embeds, atol=1e-5, rtol=0)
    assert torch.equal(ours.mask[:, :longest], mask.bool())
    assert not ours.mask[:, longest:].any()
    assert not ours.prompt_embeds[:, longest:].any()


def test_a_long_prompt_is_cut_as_the_pipeline_cuts_it(model: QwenImageModel) -> None:
    texts = ["a kite in the sky above the sea", "a cup"]
    embeds, _ = model.pipeline.encode_prompt(texts, max_sequence_length=LENGTH)
    ours = model.encode(texts)
    assert torch.equal(ours.prompt_embeds, embeds)
    assert ours.mask[0].all()


def test_padding_changes_nothing(model: QwenImageModel) -> None:
    """A prompt beside a longer one, alone, and alone with padding and its mask."""
    both = model.encode(families.PROMPTS)
    x, sigma = QWEN.noise(model), torch.tensor([0.3, 0.9])
    together = model.velocity(x, sigma, both)
    for i in range(2):
        row = slice(i, i + 1)
        alone = model.velocity(x[row], sigma[row], both.rows(row))
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=0)
        assert not torch.allclose(alone, model.velocity(x[row], sigma[row], both.rows(slice(1 - i, 2 - i))), atol=1e-3)


def test_samples_are_those_of_plain_diffusers(folder: Path) -> None:
    families.assert_samples_are_those_of_plain_diffusers(QWEN, folder)


def test_a_seed_gives_the_image_of_plain_diffusers(folder: Path) -> None:
    families.assert_a_seed_gives_the_image_of_plain_diffusers(QWEN, folder)


@pytest.mark.full
def test_exported_lora(folder: Path, tmp_path: Path) -> None:
    families.assert_exported_lora_is_that_of_plain_diffusers(QWEN, folder, tmp_path)


def test_the_readme_of_an_export_runs(folder: Path, tmp_path: Path) -> None:
    families.assert_the_readme_of_an_export_runs(QWEN, folder, tmp_path)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_gradients(folder: Path, checkpointing: bool) -> None:
    families.assert_fused_gradients_are_those_of_one_pass_each(QWEN, folder, checkpointing)


def test_what_it_refuses(folder: Path, model: QwenImageModel) -> None:
    with pytest.raises(InputError, match="width: 20 is not a multiple of 8"):
        model.latent_shape(16, 20)
    with pytest.raises(InputError, match=r"rollout\.frames: 5 given, but Qwen-Image makes images"):
        model.latent_shape(16, 16, 5)
    with pytest.raises(InputError, match=r"model\.guidance: 3\.5 given, but Qwen-Image takes no guidance"):
        QWEN.load(folder, guidance=3.5)
