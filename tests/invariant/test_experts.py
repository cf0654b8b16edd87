"""Two transformers (Wan 2.2 A14B) through the command line: resumed, in two processes or sharded, the run is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_several_processes import launch

from runs import lora_bytes, marble, metrics, train, write_config
from tools.tiny import build_tiny_wan22_14b

pytestmark = pytest.mark.full
LOW_NOISE = "pytorch_lora_weights_low_noise.safetensors"
SHARDED = "trainer.shard_base=true"
SIZE = ["--height", 16, "--width", 16, "--frames", 5]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    build_tiny_wan22_14b(folder / "model")
    rewards = [
        {"name": name, "type": "frames", "params": {"reward": {"type": kind}, "frames": 2}}
        for name, kind in {"small": "jpeg_compressibility", "bright": "brightness"}.items()
    ]
    changes: dict[str, Any] = {
        "rewards": rewards,
        "rollout": {"groups": 4, "group_size": 4, "steps": 4, "height": 16, "width": 16, "frames": 5},
        "loss": {"timesteps_per_sample": 2, "regularize_every": 2, "noise": "group"},
        "balance": {"type": "marble", "refresh_every": 2},
        "trainer": {"steps": 3, "save_every": 1, "keep_checkpoints": 3, "micro_batch": 2},
        "logging": {"images_every": None},
    }
    return write_config(folder / "config.yaml", folder / "model", **changes)


@pytest.fixture(scope="module")
def alone(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    train(config, run)
    return run


def weights(run: Path, step: int = 3) -> torch.Tensor:
    file = load_file(run / "checkpoints" / f"step-{step}" / "adapters.safetensors")
    return torch.cat([file[name].double().flatten() for name in sorted(file)])


def test_both_are_trained(alone: Path) -> None:
    for part in ("high_noise", "low_noise"):
        tensors = load_file(alone / "lora" / f"pytorch_lora_weights_{part}.safetensors")
        assert all(tensor.any() for tensor in tensors.values())


def test_a_resumed_run_is_the_uninterrupted_one(config: Path, alone: Path, tmp_path: Path) -> None:
    train(config, tmp_path / "run", "--set", "trainer.steps=1")
    train(config, tmp_path / "run", "--resume")
    assert lora_bytes(tmp_path / "run") == lora_bytes(alone)
    assert metrics(tmp_path / "run") == metrics(alone)


def test_two_processes_are_one_whole_or_sharded(config: Path, alone: Path, tmp_path: Path) -> None:
    """Sharded, ranks that made different passes would wait for each other forever."""
    commands: list[list[object]] = [
        ["train", config, "--out", tmp_path / "whole"],
        ["train", config, "--out", tmp_path / "sharded", "--set", SHARDED],
    ]
    process = launch(tmp_path / "launched", 2, commands, MARBLE_TIMEOUT="120")
    assert process.wait(600) == 0, (tmp_path / "launched" / "log").read_text()
    assert torch.equal(weights(tmp_path / "sharded"), weights(tmp_path / "whole"))
    # Of the first rollout: later ones show rounding.
    wanted = weights(alone, 1)
    assert (weights(tmp_path / "whole", 1) - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(("experts", "share"), [("both", 2), ("low", 1)])
def test_plan_and_estimate_count_both(config: Path, alone: Path, experts: str, share: int) -> None:
    given = [config, "--json", "--set", f"lora.experts={experts}"]
    planned = json.loads(marble("config", "check", *given).out)["plan"]["model"]
    estimated = json.loads(marble("config", "show", *given, "--estimate").out)["estimate"]
    one = sum(value.numel() for value in load_file(alone / "lora" / LOW_NOISE).values())
    assert planned["adapter"] == estimated["parameters"]["adapter"] == share * one
    assert estimated["weights"]["transformer"] == estimated["weights"]["transformer_2"]
    resident = sum(size for part, size in estimated["weights"].items() if part != "text_encoder")
    assert estimated["stages"]["rollout, sampling"] == resident + estimated["rollout"] + estimated["sampling"]
    assert planned["memory"] > 2 * estimated["weights"]["transformer"]


def test_using_the_run(alone: Path, tmp_path: Path) -> None:
    """An export of both LoRAs is sampled like the run."""
    asked = ["--prompt", "a cup", "--seed", 3, "--steps", 3, *SIZE]
    exported = marble("export", alone, "--out", tmp_path / "lora")
    assert exported.code == 0, exported.err
    for name, target in {"of-run": alone, "of-lora": tmp_path / "lora"}.items():
        sampled = marble("sample", target, *asked, "--out", tmp_path / name)
        assert sampled.code == 0, sampled.err
    assert contents(tmp_path / "of-lora") == contents(tmp_path / "of-run")
    diagnosed = marble("diagnose", alone, "--batches", 3)
    assert diagnosed.code == 0, diagnosed.err
    card = (tmp_path / "lora" / "README.md").read_text()
    assert 'weight_name="pytorch_lora_weights_low_noise.safetensors", load_into_transformer_2=True)' in card
    for_comfyui = marble("export", alone, "--out", tmp_path / "comfyui", "--format", "comfyui")
    assert for_comfyui.code == 0, for_comfyui.err
    assert "load each onto the model of its name, with" in (tmp_path / "comfyui" / "README.md").read_text()


def contents(folder: Path) -> list[bytes]:
    files = sorted(folder.iterdir())
    assert files
    return [file.read_bytes() for file in files]
