"""All commands on an accelerator, with the bits of the CPU. The accelerator is simulated (helpers/simulated): it has
tensors of its own, and refuses what a GPU refuses. Each test runs in a process of its own, which has that device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import CASES

from reward_device import VARIABLE
from runs import TESTS, lora_bytes, metrics
from tools.tiny import BUILDERS

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch cannot define a device in Python; the pinned version can",
    ),
]
MIXED = "Expected all tensors to be on the same device"


def run_on_accelerator(*commands: list[object], **environment: str) -> str:
    """The output of these commands on a machine that has the simulated accelerator."""
    process = subprocess.run(
        [sys.executable, "-m", "simulated", *(json.dumps([str(word) for word in words]) for words in commands)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS,
        check=False,
    )
    return process.stdout if process.returncode == 0 else f"exit {process.returncode}\n{process.stdout}"


def every_command(name: str, rule: str, folder: Path, device: str, **changes: object) -> list[list[object]]:
    """Train two steps, continue for two more, and use the run in all ways."""
    case, run = CASES[name], folder / "run"
    own = {"model.device": device, "balance": f"{{type: {rule}}}", "trainer.save_every": 2}
    every_level = {"loss.timestep_fraction": 1.0}  # so that both transformers of Wan 2.2 have one
    given = case.shrunk_to(folder.parent / "model", **own, **every_level, **changes)
    return [
        ["train", case.config, "--out", run, *given, "--set", "trainer.steps=2"],
        ["train", case.config, "--out", run, *given, "--set", "trainer.steps=4", "--resume"],
        ["evaluate", run, "--device", device],
        ["sample", run, "--prompt", "a red cup", "--seed", 3, "--device", device, "--out", folder / "sample"],
        ["export", run, "--out", folder / "exported"],
        ["diagnose", run, "--batches", 3, "--device", device],
    ]


def results(folder: Path) -> dict[str, Any]:
    """What the commands left, without times, memory and the name of the device."""
    run = folder / "run"
    weights = [*(run / "checkpoints" / "step-4").glob("*.safetensors"), *(folder / "exported").glob("*.safetensors")]
    pictures = (folder / "sample").iterdir()
    return {
        "lora": lora_bytes(run),
        "metrics": metrics(run),
        "evaluation": json.loads((run / "evaluation" / "scores.json").read_text())["weights"],
        "diagnosis": json.loads((run / "diagnosis" / "diagnosis.json").read_text()),
        **{str(file.relative_to(folder)): file.read_bytes() for file in (*weights, *pictures)},
    }


RULES = {
    "sd3": "fair",
    "flux": "marble",
    "qwen_image": "fair",
    "wan": "marble",
    "wan22_5b": "fair",
    "wan22_14b": "marble",
}


@pytest.mark.parametrize(("name", "rule"), RULES.items())
def test_every_command_gives_the_bits_of_the_cpu(name: str, rule: str, tmp_path: Path) -> None:
    BUILDERS[name](tmp_path / "model")
    found = {}
    for device in ("auto", "cpu"):
        (tmp_path / device).mkdir()
        output = run_on_accelerator(*every_command(name, rule, tmp_path / device, device))
        assert not output.startswith("exit"), output
        assert f"on {'sim' if device == 'auto' else 'cpu'}: trains" in output, output
        found[device] = results(tmp_path / device)
    assert found["auto"].keys() == found["cpu"].keys()
    assert len(found["cpu"]) == (9 if name == "wan22_14b" else 8)  # a LoRA for each of its transformers
    differing = [key for key in found["cpu"] if found["auto"][key] != found["cpu"][key]]
    assert not differing


def train_on_accelerator(folder: Path, environment: dict[str, str] | None = None, **changes: object) -> str:
    """Two steps of SD3, and two more after a resume."""
    folder.mkdir(exist_ok=True)
    BUILDERS["sd3"](folder / "model")
    return run_on_accelerator(
        *every_command("sd3", "fair", folder / "on", "auto", **changes)[:2], **(environment or {})
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains(dtype: str, tmp_path: Path) -> None:
    """By CUDA's lists of autocast, which are not the CPU's."""
    output = train_on_accelerator(tmp_path, **{"model.dtype": dtype, "model.vae_dtype": "bfloat16"})
    assert "step 4/4" in output, output
    lines = metrics(tmp_path / "on" / "run")
    assert all(value is not None for value in lines[-1].values())
    assert lines[-1]["update/norm"] > 0


def test_a_device_without_float64_trains_with_the_bits_of_one_that_has_it(tmp_path: Path) -> None:
    """Like MPS: products of gradients are then added up on the CPU."""
    found = []
    for has_it in ("yes", "no"):
        output = train_on_accelerator(tmp_path / has_it, {"SIMULATED_FLOAT64": has_it})
        assert "step 4/4" in output, output
        found.append(lora_bytes(tmp_path / has_it / "on" / "run"))
    assert found[0] == found[1]


PLANTED = {
    "noise stays on the host": ("training.batch", "self.noise(rows, level).to(device)", "self.noise(rows, level)"),
    "prompts stay on the host": ("models.base", "cat(rows).to(self._model.device)", "cat(rows)"),
    "momenta stay on the host": ("balancing.momenta", "self.values.to(device)", "self.values"),
}
"""Module, text, and what takes its place"""


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_mix_of_devices_is_found(bug: str, tmp_path: Path) -> None:
    output = train_on_accelerator(tmp_path, {"PLANTED": "|".join(PLANTED[bug])})
    assert output.startswith("exit 70"), output
    assert MIXED in output


def test_the_reward_models_score_on_it() -> None:
    """Their own tests, with independent references, on this device."""
    models = ("clip_rewards", "openclip", "imagereward", "photo_detector")
    files = [f"rewards/builtin/test_{name}.py" for name in models]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, VARIABLE: "sim"},
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout
