"""Wan 2.2, with a timestep for every token or with two transformers, against diffusers' own pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from test_lora_formats import changes
from torch import Tensor

import families
from built_once import built_once
from families import WAN
from lora_readers import in_own_layers, own_places, read_by_comfyui
from marble_rl.errors import InputError
from marble_rl.losses.base import Noised
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.models.base import PromptCache
from marble_rl.models.experts import Experts
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.prompts import load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rollout.rollout import roll_out
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.training.batch import TrainingBatch, training_batch, training_levels
from marble_rl.types import Rollout
from stages import policy_gradients
from tools.tiny import BUILDERS

NAMES = ("wan22_5b", "wan22_14b")
LEVELS = torch.tensor([0.9, 0.3, 0.875, 0.8749, 1.0])
"""Two below the boundary, in between"""


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(request.param, tmp_path_factory)


@pytest.fixture
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wan22_14b", tmp_path_factory)


def built(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_once(tmp_path_factory, f"tiny-{name.replace('_', '-')}", BUILDERS[name])


def test_samples_are_those_of_plain_diffusers(folder: Path) -> None:
    families.assert_samples_are_those_of_plain_diffusers(WAN, folder)


def test_a_seed_gives_the_video_of_plain_diffusers(folder: Path) -> None:
    families.assert_a_seed_gives_the_image_of_plain_diffusers(WAN, folder)


@pytest.mark.full
def test_exported_lora(folder: Path, tmp_path: Path) -> None:
    families.assert_exported_lora_is_that_of_plain_diffusers(WAN, folder, tmp_path)


def test_the_readme_of_an_export_runs(folder: Path, tmp_path: Path) -> None:
    families.assert_the_readme_of_an_export_runs(WAN, folder, tmp_path)


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.full)])
def test_fused_gradients(folder: Path, checkpointing: bool) -> None:
    families.assert_fused_gradients_are_those_of_one_pass_each(WAN, folder, checkpointing, levels=2)


def test_sizes(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = WAN.load(built("wan22_5b", tmp_path_factory))
    assert model.latent_shape(16, 32, 5) == (4, 2, 2, 4)
    with pytest.raises(InputError, match="height: 24 is not a multiple of 16"):
        model.latent_shape(24, 16, 5)


@pytest.mark.parametrize("steps", [2, 20, 50])
def test_a_level_has_the_expert_that_plain_diffusers_takes(two: Path, steps: int) -> None:
    """Whose published scheduler rounds timesteps."""
    model = WAN.load(two)
    families.adapted(model)
    scheduler = UniPCMultistepScheduler.from_config(model.pipeline.scheduler.config)
    scheduler.set_timesteps(steps)
    theirs = (scheduler.timesteps < 0.875 * 1000).long()
    assert theirs.unique().tolist() == [0, 1]
    assert torch.equal(model.experts(model.sigmas(steps, (4, 2, 4, 8))[:-1]), theirs)


def inputs(model: Any, rows: int = len(LEVELS)) -> tuple[Tensor, Any]:
    noise = torch.randn((rows, *model.latent_shape(**WAN.size)), generator=torch.Generator().manual_seed(4))
    return noise, PromptCache(model).encode([f"{count} red hats" for count in range(rows)])


def by_hand(model: Any, x: Tensor, sigma: Tensor, prompts: Any) -> Tensor:
    """Row by row, through the pipeline's own transformers."""
    rows = []
    for i, level in enumerate(sigma):
        transformer = model.pipeline.transformer if 1000 * level >= 875 else model.pipeline.transformer_2
        row = slice(i, i + 1)
        rows += transformer(x[row], 1000 * sigma[row], prompts.prompt_embeds[row], return_dict=False)
    return torch.cat(rows)


def test_a_batch_of_mixed_levels_is_predicted_row_by_row(two: Path) -> None:
    model = WAN.load(two)
    families.adapted(model)
    x, prompts = inputs(model)
    with torch.no_grad():
        found, wanted = model.velocity(x, LEVELS, prompts), by_hand(model, x, LEVELS, prompts)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
        backwards = model.velocity(x, LEVELS.flip(0), prompts)
        torch.testing.assert_close(backwards, by_hand(model, x, LEVELS.flip(0), prompts), atol=1e-5, rtol=0)
    assert (found - backwards)[[0, 1, 3, 4]].abs().amax((1, 2, 3, 4)).min() > 0.01


@pytest.mark.parametrize("role", ["base", "old", "ema"])
def test_other_policies_are_routed_alike(two: Path, role: Any) -> None:
    model = WAN.load(two)
    policy = families.adapted(model)
    x, prompts = inputs(model)
    with policy.acting_as(role):
        found = model.velocity(x, LEVELS, prompts)
        torch.testing.assert_close(found, by_hand(model, x, LEVELS, prompts), atol=1e-5, rtol=0)
    if role == "base":
        plain = WAN.load(two)
        torch.testing.assert_close(found, plain.velocity(x, LEVELS, prompts), atol=1e-6, rtol=0)


def sampled(model: Any, policy: LoraPolicy, steps: int = 4) -> Rollout:
    texts = [*families.PROMPTS, "a kite in the sky", "an ox"]
    prompts = load_prompts([PromptSourceConfig(name="a", texts=texts)], "prompts")
    config = RolloutConfig(groups=4, group_size=4, steps=steps, **WAN.size)
    return roll_out(model, policy, PromptCache(model), prompts.draw(0, 0, 4), config, seed=0, index=0)


def drawn(model: Any, rollout: Rollout, step: int = 9, **settings: Any) -> TrainingBatch:
    loss = Nft(NftSettings(timestep_fraction=1.0, **settings))
    return training_batch(rollout, 0, loss, seed=5, step=step, expert_of=model.experts)


@pytest.mark.parametrize("experts", ["both", pytest.param("low", marks=pytest.mark.full)])
def test_gradients_are_those_of_autograd_through_the_pipelines_transformers(two: Path, experts: Any) -> None:
    """The slopes of all samples in one graph, without the code that routes, divides or fuses."""
    model = WAN.load(two)
    policy = families.adapted(model, experts=experts)
    batch = drawn(model, sampled(model, policy), timesteps_per_sample=1)
    columns = torch.randn(16, 3, generator=torch.Generator().manual_seed(3))
    given = {"per_column": True, "micro_batch": 3}
    found = policy_gradients(model, policy, batch, columns, NftSettings(kl_weight=0.0), **given).gradients
    assert found.by_passes == ()

    sample, prompts = batch.noised(torch.arange(16), 0)
    assert (sample.t < 0.875).unique().tolist() == ([False, True] if experts == "both" else [True])
    with policy.acting_as("old"):
        v_old = by_hand(model, sample.x_t, sample.t, prompts)
    v = by_hand(model, sample.x_t, sample.t, prompts)
    terms = Nft(NftSettings()).terms(v, v_old, Noised(sample.x0, sample.noise, sample.x_t, sample.t))
    for j, row in enumerate(found.g):
        mean = (columns[:, j] * terms.slope).mean()
        wanted = torch.cat([part.flatten() for part in torch.autograd.grad(mean, policy.parameters, retain_graph=True)])
        assert wanted.norm() > 0
        assert (row - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_micro_batch_has_samples_of_one_expert_and_each_sample_once(two: Path) -> None:
    model = WAN.load(two)
    policy = families.adapted(model)
    batch = drawn(model, sampled(model, policy), timesteps_per_sample=3, regularize_every=2)
    seen = []
    for rows, level, _ in batch.micro_batches(3):
        assert 1 <= len(rows) <= 3
        assert len(batch.experts[rows, level].unique()) == 1
        seen += [(row, level) for row in rows.tolist()]
    assert sorted(seen) == [(row, level) for row in range(16) for level in range(3)]
    # Ranks that share a sharded model have different groups, and must make the same passes.
    assert (batch.experts.view(4, 4, 3) == batch.experts[:4]).all()
    assert len({tuple(levels) for levels in batch.sigmas.tolist()}) > 8


def test_every_level_is_drawn_equally_often(two: Path) -> None:
    model = WAN.load(two)
    rollout = sampled(model, families.adapted(model), steps=5)
    levels = rollout.sigmas[:-1]
    counts = torch.zeros(5)
    for step in range(150):
        sigmas = drawn(model, rollout, step, timesteps_per_sample=2).sigmas
        assert all(len(set(row)) == 2 for row in sigmas.tolist())
        counts += (sigmas[:, :, None] == levels).sum((0, 1))
    # The levels of one expert within a step are not independent of each other; the steps are.
    assert (counts / counts.sum() - 0.2).abs().max() < 0.035


@pytest.mark.parametrize(
    ("experts", "other"), [("low", "high_noise"), pytest.param("high", "low_noise", marks=pytest.mark.full)]
)
def test_one_expert_alone_is_adapted_trained_and_written(two: Path, tmp_path: Path, experts: Any, other: str) -> None:
    model = WAN.load(two)
    policy = families.adapted(model, experts=experts)
    assert all(name.startswith(f"{experts}_noise.") for name in policy.names)
    x, prompts = inputs(model)
    with torch.no_grad():
        changed = (model.velocity(x, LEVELS, prompts) - WAN.load(two).velocity(x, LEVELS, prompts)).abs()
    is_low = LEVELS < 0.875
    assert torch.equal(changed.amax((1, 2, 3, 4)) > 0, is_low if experts == "low" else ~is_low)

    batch = drawn(model, sampled(model, policy))
    assert torch.equal(batch.sigmas < 0.875, torch.full_like(batch.sigmas, experts == "low", dtype=torch.bool))
    model.write_lora(tmp_path, "ema")
    assert [file.name for file in tmp_path.iterdir()] == [f"pytorch_lora_weights_{experts}_noise.safetensors"]
    families.assert_plain_diffusers_with_the_lora_samples_as_we_do(WAN, two, model, policy, tmp_path)
    with pytest.raises(InputError, match=rf"there is no pytorch_lora_weights_{other}\.safetensors"):
        LoraPolicy(WAN.load(two).transformer, LoraConfig(rank=2, init=tmp_path), model.lora_targets, seed=0)


def test_the_file_of_each_expert_is_read_as_it_was_trained(two: Path, tmp_path: Path) -> None:
    """In all formats; plain diffusers loads one transformer at a time."""
    model = WAN.load(two)
    families.adapted(model)
    experts = {"high_noise": model.pipeline.transformer, "low_noise": model.pipeline.transformer_2}
    for layout in ("diffusers", "comfyui", "kohya"):
        model.write_lora(tmp_path / layout, "ema", layout)
    pipeline = WAN.plain(two, model)
    families.load_lora(pipeline, tmp_path / "diffusers", adapter_name="read")
    read = {"high_noise": pipeline.transformer, "low_noise": pipeline.transformer_2}
    for part, expert in experts.items():
        wanted = changes(expert, "ema")
        torch.testing.assert_close(changes(read[part], "read"), wanted, atol=1e-6, rtol=0)
        places = own_places("wan", expert)
        own = in_own_layers(wanted, places)
        for layout in ("comfyui", "kohya"):
            file = tmp_path / layout / f"pytorch_lora_weights_{part}.safetensors"
            torch.testing.assert_close(read_by_comfyui(file, "wan", places, own), own, atol=1e-6, rtol=0)
    assert not torch.equal(*(changes(expert, "ema")["blocks.0.attn1.to_q"] for expert in experts.values()))


def test_a_run_starts_from_the_lora_of_both(two: Path, tmp_path: Path) -> None:
    model = WAN.load(two)
    policy = families.adapted(model)
    model.write_lora(tmp_path, "ema")
    with policy.acting_as("ema"):
        wanted, _ = WAN.ours(model)
    again = WAN.load(two)
    LoraPolicy(again.transformer, LoraConfig(rank=2, alpha=1, init=tmp_path), model.lora_targets, seed=0)
    torch.testing.assert_close(WAN.ours(again)[0], wanted, atol=1e-5, rtol=0)


def test_what_it_refuses(two: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = WAN.load(built("wan22_5b", tmp_path_factory))
    with pytest.raises(InputError, match=r"lora\.experts: 'low' given, but this model has a single transformer"):
        families.adapted(model, experts="low")
    model = WAN.load(two)
    assert isinstance(model.transformer, Experts)
    families.adapted(model)
    loss = Nft(NftSettings(timestep_fraction=0.5))
    with pytest.raises(InputError, match=r"for low noise is adapted, but none of the 1 noise levels that are trained"):
        training_levels(loss, model.sigmas(2, (4, 2, 4, 8)), model.experts)
