"""`lora.init`: training goes on from a LoRA, and one that does not fit is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marble_rl.inference.opening import open_target
from marble_rl.models import load_model
from marble_rl.models.base import JOINT_ATTENTION, DiffusionModel, PromptCache
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.models.lora_files import LORA_FILE
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.rollout import sample
from runs import base_config, marble, train, write_config
from tools.tiny import build_tiny_flux

LORA = {"rank": 2, "alpha": 8}


@pytest.fixture
def run(finished_run: Path) -> Path:
    return finished_run


def latents(model: DiffusionModel) -> torch.Tensor:
    shape = model.latent_shape(None, None)
    noise = torch.randn((1, *shape), generator=torch.Generator().manual_seed(5))
    return sample(model, noise, PromptCache(model).encode(["a red cup"]), model.sigmas(4, shape), "euler")[0]


@pytest.mark.parametrize("inside", ["lora", f"lora/{LORA_FILE}"], ids=["folder", "file"])
def test_all_adapters_start_as_the_lora_and_the_reference_as_the_bare_model(
    run: Path, tiny_sd3: Path, inside: str
) -> None:
    def fresh() -> DiffusionModel:
        return load_model(str(tiny_sd3), torch.device("cpu"), 16)

    plain = fresh()
    bare = latents(plain)
    plain.read_lora(run / "lora")
    wanted = latents(plain)
    assert (wanted - bare).abs().max() > 1e-2
    model = fresh()
    policy = LoraPolicy(model.transformer, LoraConfig(**LORA, init=run / inside), model.lora_targets, seed=3)
    for adapter in ADAPTERS:
        with policy.acting_as(adapter):
            torch.testing.assert_close(latents(model), wanted, atol=1e-5, rtol=0)
    with policy.acting_as("base"):
        torch.testing.assert_close(latents(model), bare, atol=1e-6, rtol=0)


def test_training_goes_on_from_it_and_does_not_need_it_later(run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "lora", tmp_path / "start")
    config = write_config(tmp_path / "config.yaml", tiny_sd3, lora={**LORA, "init": "start"})  # beside the config
    train(config, tmp_path / "run", "--set", "trainer.steps=1", "--set", "optimizer.lr=1e-9")
    start, end = (load_file(folder / LORA_FILE) for folder in (tmp_path / "start", tmp_path / "run" / "lora"))
    assert start.keys() == end.keys()
    for name, value in start.items():
        torch.testing.assert_close(end[name], value, atol=1e-6, rtol=0)
    shutil.rmtree(tmp_path / "start")
    assert open_target(str(tmp_path / "run")).step == 1
    evaluated = marble("evaluate", tmp_path / "run")
    assert evaluated.code == 0, evaluated.err


def test_any_alpha_gives_the_weights_of_the_lora(run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    """Of a file whose alpha is its rank, as marble writes it; of one with the alpha of the training, as version 0.1.0
    wrote it; and of one without metadata, whose alpha is the rank in plain diffusers too."""
    tensors = load_file(run / "lora" / LORA_FILE)
    save_file(tensors, tmp_path / "bare.safetensors")
    unfolded = {name: value / 4 if "lora_B" in name else value for name, value in tensors.items()}
    metadata = {"transformer.r": 2, "transformer.lora_alpha": 8, "transformer.target_modules": list(JOINT_ATTENTION)}
    save_file(unfolded, tmp_path / "older.safetensors", {"lora_adapter_metadata": json.dumps(metadata)})
    trained = open_target(str(run)).policy
    assert trained is not None
    plain = load_model(str(tiny_sd3), torch.device("cpu"), 16)
    plain.read_lora(run / "lora")
    wanted = latents(plain)
    older = load_model(str(tiny_sd3), torch.device("cpu"), 16)
    older.read_lora(tmp_path / "older.safetensors")
    torch.testing.assert_close(latents(older), wanted, atol=1e-6, rtol=0)
    for file in (run / "lora", tmp_path / "older.safetensors", tmp_path / "bare.safetensors"):
        assert checked(tiny_sd3, tmp_path, **LORA, init=str(file)) == ""
        for alpha in (8, 3):
            model = load_model(str(tiny_sd3), torch.device("cpu"), 16)
            settings = LoraConfig(rank=2, alpha=alpha, init=file)
            policy = LoraPolicy(model.transformer, settings, model.lora_targets, seed=3)
            with policy.acting_as("default"):
                torch.testing.assert_close(latents(model), wanted, atol=1e-5, rtol=0)
            if alpha == 8:  # that of the training: nothing is rounded
                start = policy.tensors("default")
                assert all(torch.equal(start[name], value) for name, value in trained.tensors("ema").items())


def checked(model: Path, folder: Path, **lora: Any) -> str:
    """What `config check` says against it."""
    outcome = marble("config", "check", write_config(folder / "config.yaml", model, lora=lora))
    assert outcome.code == (2 if outcome.err else 0)
    return outcome.err


def test_the_page_on_exporting_converts_a_lora(run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text(encoding="utf-8")
    (code,) = (block.split("```")[0] for block in page.split("```python\n") if "CONVERTED" in block)
    for name, path in (("THE_MODEL", tiny_sd3), ("THEIR_LORA", run / "lora"), ("CONVERTED", tmp_path / "converted")):
        code = code.replace(name, str(path))
    exec(compile(code, "exporting.md", "exec"), {})
    assert checked(tiny_sd3, tmp_path, **LORA, init="converted") == ""
    ours, theirs = (load_file(folder / LORA_FILE) for folder in (run / "lora", tmp_path / "converted"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    lora = str(run / "lora")
    assert "has rank 2, but lora.rank is 4; set lora.rank: 2" in checked(tiny_sd3, tmp_path, rank=4, alpha=8, init=lora)
    assert "no such file or folder" in checked(tiny_sd3, tmp_path, **LORA, init="nowhere")
    assert f"did you mean {run / 'lora'}?" in checked(tiny_sd3, tmp_path, **LORA, init=str(run))
    (tmp_path / "broken.safetensors").write_bytes(b"no header here")
    assert "cannot be read as safetensors" in checked(tiny_sd3, tmp_path, **LORA, init="broken.safetensors")
    tensors = load_file(run / "lora" / LORA_FILE)
    save_file({k.replace("transformer.", "lora_unet_", 1): v for k, v in tensors.items()}, tmp_path / "x.safetensors")
    assert "not a plain LoRA of a transformer" in checked(tiny_sd3, tmp_path, **LORA, init="x.safetensors")
    first = next(name for name in tensors if name.endswith("lora_A.weight"))
    save_file({**tensors, first: tensors[first][:1].clone()}, tmp_path / "x.safetensors")
    assert "has ranks [1, 2]" in checked(tiny_sd3, tmp_path, **LORA, init="x.safetensors")


def test_a_lora_of_another_model(run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    build_tiny_flux(tmp_path / "tiny-flux")
    size = {"height": 16, "width": 16}
    other = write_config(
        tmp_path / "flux.yaml",
        tmp_path / "tiny-flux",
        lora={**LORA, "init": str(run / "lora")},
        rollout={**base_config(tiny_sd3)["rollout"], **size},
    )
    few = write_config(tmp_path / "few.yaml", tiny_sd3, lora={**LORA, "init": str(run / "lora"), "targets": ["to_q"]})
    more = [*JOINT_ATTENTION, "ff.net.2"]
    many = write_config(tmp_path / "many.yaml", tiny_sd3, lora={**LORA, "init": str(run / "lora"), "targets": more})
    for config, says in [
        (other, "is a LoRA of another model: it adapts the layer transformer_blocks."),
        (few, "is a LoRA of another model: it adapts the layer transformer_blocks.0.attn."),
        (many, "is a LoRA of another model, or of other layers: it has no transformer_blocks.0.ff.net.2"),
    ]:
        outcome = marble("train", config, "--out", tmp_path / "run")
        assert outcome.code == 2
        assert "lora.init" in outcome.err
        assert says in outcome.err
        assert not (tmp_path / "run").exists()
    sampled = marble(
        "sample", run / "lora", "--model", tmp_path / "tiny-flux", "--prompt", "x", "--out", tmp_path / "s"
    )
    assert sampled.code == 2
    assert "is a LoRA of another model" in sampled.err
