"""The estimate of a run's memory: exact where it counts, close where it can be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from marble_rl.config import RunConfig, load_config
from marble_rl.errors import InputError
from marble_rl.gradients.halves import SAMPLED, buffer_numbers
from marble_rl.losses.nft import Nft
from marble_rl.memory.allocations import Allocations
from marble_rl.memory.empty_model import build_empty, config_folder
from marble_rl.memory.estimate import Estimate, estimate_run, sizes
from marble_rl.models import load_model
from marble_rl.models.base import PromptCache
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.precision import MemorySettings, memory_settings
from marble_rl.prompts import load_prompts
from marble_rl.rollout.rollout import roll_out
from marble_rl.training.batch import training_batch
from runs import base_config, marble, write_config
from stages import policy_gradients
from tools.published import PUBLISHED, write_published
from tools.tiny import BUILDERS

CPU = torch.device("cpu")


def run_config(folder: Path, path: Path, *overrides: str) -> RunConfig:
    rollout = {"groups": 4, "group_size": 4, "steps": 3, "height": 32, "width": 32}
    return load_config(write_config(path, folder, rollout=rollout), overrides)


@pytest.mark.parametrize("family", list(BUILDERS))
def test_parameters_and_weights_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    BUILDERS[family](tmp_path / "model")
    config = load_config(write_config(tmp_path / "c.yaml", tmp_path / "model"))
    empty = build_empty(config, tmp_path / "model")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        memory = MemorySettings(dtype=dtype)
        parameters, held = sizes(empty, memory)
        model: Any = load_model(config.model.path, CPU, 16, memory=memory)
        names = ["transformer", "transformer_2", "vae", *model.text_parts]
        parts = {name: part for name in names if (part := getattr(model.pipeline, name, None)) is not None}
        assert parameters == {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
        assert held == {
            name: sum(p.numel() * p.element_size() for p in part.parameters()) for name, part in parts.items()
        }
    blank, real = empty.blank_conditioning(1), model.encode(["a cup"])
    assert blank.prompt_embeds.shape == real.prompt_embeds.shape
    assert empty.latent_shape(32, 32) == model.latent_shape(32, 32)


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "kl_weight"),
    [
        ("float32", False, 0.1),
        pytest.param("float32", False, 0.0, marks=pytest.mark.full),
        pytest.param("bfloat16", True, 0.1, marks=pytest.mark.full),
    ],
)
def test_passes_take_what_they_really_take(
    tiny_sd3: Path, tmp_path: Path, dtype: str, checkpointing: bool, kl_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a count of what the trainer's own code allocates, tensor by tensor."""
    # It holds a few megabytes of attention weights at a time, which is much for so small a model.
    monkeypatch.setattr("marble_rl.models.cpu_products.MOST_WEIGHTS", 0)
    settings = (f"model.dtype={dtype}", f"model.gradient_checkpointing={str(checkpointing).lower()}")
    config = run_config(
        tiny_sd3, tmp_path / "c.yaml", *settings, "trainer.micro_batch=4", f"loss.kl_weight={kl_weight}"
    )
    found = estimate_run(config, CPU)
    model: Any = load_model(config.model.path, CPU, 16, memory=memory_settings(config.model, CPU))
    policy = LoraPolicy(model.transformer, config.lora, model.lora_targets, seed=0)
    assert found.parameters["adapter"] == policy.flat.numel()
    assert found.gradient_buffer == buffer_numbers(3 + 1, policy.flat.numel(), SAMPLED) * 4
    if kl_weight:  # otherwise on-policy as well: nothing but the rewards' own gradients
        policy.load_tensors("old", {name: tensor + 0.1 for name, tensor in policy.tensors("old").items()})
    prompts = load_prompts(config.prompts.train, "prompts.train").draw(0, 0, 4)
    with Allocations() as sampled:
        rollout = roll_out(model, policy, PromptCache(model), prompts, config.rollout, seed=0, index=0)
    assert found.images == rollout.images.numel()
    batch = training_batch(rollout, 0, Nft(config.loss), seed=0, step=0)
    columns = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    with Allocations() as trained:
        policy_gradients(model, policy, batch, columns, config.loss, per_column=True, micro_batch=4)
    expected = found.gradient_buffer + (found.training_checkpointed if checkpointing else found.training)
    assert 0.85 < expected / trained.peak < 1.25
    expected = max(found.sampling, found.decoding) + found.rollout + found.images
    assert 0.85 < expected / sampled.peak < 1.2


def test_allocations_are_counted_and_freed() -> None:
    with Allocations() as counted:
        kept = torch.zeros(1000)
        view = kept[:10].reshape(2, 5)
        assert counted.live == counted.peak == 4000
        gone = torch.ones(500) + 1.0
        assert counted.live == 6000
        del gone
        assert (counted.live, counted.peak) == (4000, 8000)  # ones, and their sum
        view += 1.0
        assert counted.live == 4000


@pytest.mark.full
def test_what_saves_memory_saves_it(tiny_sd3: Path, tmp_path: Path) -> None:
    def found(*overrides: str) -> Estimate:
        return estimate_run(run_config(tiny_sd3, tmp_path / "c.yaml", *overrides), CPU)

    plain = found()
    assert plain.training_checkpointed < plain.training
    assert plain.peak == max(plain.stages.values()) > plain.resident > 0
    small = found("rollout.batch_size=1", "trainer.micro_batch=1", "model.gradient_checkpointing=true")
    assert small.sampling < plain.sampling / 2
    assert small.decoding < plain.decoding / 2
    assert small.training < plain.training / 2
    assert plain.stages["gradients"] - small.stages["gradients"] == plain.training - small.training_checkpointed
    few = found("model.dtype=bfloat16", "model.quantize=int8", "model.decoding=sliced", "balance={type: weighted_sum}")
    assert few.weights["transformer"] < 0.4 * plain.weights["transformer"]
    assert few.training < plain.training
    assert small.decoding <= few.decoding < plain.decoding / 2
    assert few.gradient_buffer == few.parameters["adapter"] * 4, "one row: what an ordinary step accumulates"
    assert plain.gradient_buffer == pytest.approx((5 + 4 / SAMPLED) * few.gradient_buffer, rel=1e-3)
    fair = found("balance={type: fair}")
    assert fair.gradient_buffer == 5 * few.gradient_buffer, "halves are not compared"
    assert (plain.rule, fair.rule) == (0, 4 * few.gradient_buffer / 2), "four momenta in bfloat16"
    assert fair.resident == plain.resident + fair.rule


PARAMETERS = {
    "sd3.5-medium": {"transformer": 2_243_171_520, "vae": 83_819_683, "text_encoder_2": 694_659_840},
    "flux.1-dev": {"transformer": 11_901_408_320, "text_encoder": 123_060_480, "text_encoder_2": 4_762_310_656},
    "qwen-image": {"transformer": 20_430_401_088, "text_encoder": 8_292_166_656, "vae": 126_892_531},
    "wan2.1-1.3b": {"transformer": 1_418_996_800, "text_encoder": 5_680_910_336, "vae": 126_892_531},
    "wan2.1-14b": {"transformer": 14_288_491_584},
    "wan2.2-ti2v-5b": {"transformer": 4_999_787_712, "vae": 704_688_668},
    "wan2.2-t2v-a14b": {"transformer": 14_288_491_584, "transformer_2": 14_288_491_584, "vae": 126_892_531},
}
"""As their weights' files have them."""


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_configs_give_the_published_sizes(name: str, tmp_path: Path) -> None:
    write_published(name, tmp_path / name)
    config = load_config(write_config(tmp_path / "c.yaml", tmp_path / name))
    pipeline = build_empty(config, tmp_path / name).pipeline
    found = {part: sum(p.numel() for p in getattr(pipeline, part).parameters()) for part in PARAMETERS[name]}
    assert found == PARAMETERS[name]


def test_unknown_published_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown pipeline 'sdxl'; use one of sd3\.5-medium, flux\.1-dev"):
        write_published("sdxl", tmp_path)


def test_the_command_shows_it_in_comments(config_file: Path) -> None:
    shown = marble("config", "show", config_file).out
    comments = [line for line in shown.splitlines() if line.startswith("#")]
    assert comments[0].startswith("# Memory on cpu in float32: estimated from the model's configs, not measured")
    assert any("gradients" in line for line in comments)
    plain = marble("config", "show", config_file, "--no-estimate").out
    assert shown.startswith(plain)
    assert yaml.safe_load(shown) == yaml.safe_load(plain)
    cuda = marble("config", "show", config_file, "--on", "cuda").out
    assert "# Memory on cuda in bfloat16" in cuda


@pytest.mark.full
def test_a_sharded_base_is_said_to_be_counted_whole(config_file: Path) -> None:
    sharded = marble("config", "show", config_file, "--set", "trainer.shard_base=true").out
    assert "# Sharded: with trainer.shard_base each of N ranks keeps one Nth of the transformer" in sharded
    assert "Sharded" not in marble("config", "show", config_file).out


@pytest.mark.full
def test_an_attention_backend_that_is_not_here_is_estimated_all_the_same(tmp_path: Path) -> None:
    BUILDERS["flux"](tmp_path / "flux")
    plain, flash = (
        estimate_run(run_config(tmp_path / "flux", tmp_path / "c.yaml", *settings), CPU)
        for settings in ((), ("model.attention=flash",))
    )
    assert flash == plain


def test_the_command_in_json(config_file: Path) -> None:
    config = json.loads(marble("config", "show", config_file, "--json").out)
    both = json.loads(marble("config", "show", config_file, "--json", "--estimate").out)
    assert both["config"] == config
    assert both["estimate"]["peak"] == max(both["estimate"]["stages"].values())


def test_a_model_out_of_reach_is_no_error(tiny_sd3: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({**base_config(tiny_sd3), "model": {"path": "nobody/nothing"}}))
    outcome = marble("config", "show", config)
    assert outcome.code == 0
    assert (
        "# Memory: no estimate. model.path: the pipeline's model_index.json of 'nobody/nothing' is neither"
        in outcome.out
    )
    for path in ("nobody/nothing", "../build/nothing"):
        with pytest.raises(InputError, match=path):
            config_folder(path)
