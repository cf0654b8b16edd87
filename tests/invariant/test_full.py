"""Slower proofs: kills at any moment of a run's life, a disk that is really full, and rewards that really rise."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from runs import lora_bytes, marble, metrics, start, train

pytestmark = pytest.mark.full
CONFIGS = Path(__file__).parents[2] / "configs"


def test_killed_at_any_moment(config_file: Path, tmp_path: Path) -> None:
    """Eight kills anywhere between start and end: loading, sampling, training, writing a checkpoint."""
    every_step = ["--set", "trainer.save_every=1"]
    train(config_file, tmp_path / "whole", *every_step)
    began = time.monotonic()
    start("train", config_file, "--out", tmp_path / "timed", *every_step).communicate()
    life = time.monotonic() - began

    run, dice = tmp_path / "run", random.Random(3)
    kills = 0
    while kills < 8 and not (run / "lora").exists():
        process = start("train", config_file, "--out", run, "--resume-or-start", *every_step)
        time.sleep(dice.uniform(0.6 * life, life))
        process.kill()
        process.communicate()
        kills += 1
    train(config_file, run, "--resume", *every_step)
    assert lora_bytes(run) == lora_bytes(tmp_path / "whole")
    assert metrics(run) == metrics(tmp_path / "whole")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(config_file: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        keep_all = ["--set", "trainer.keep_checkpoints=50", "--set", "trainer.save_every=1"]
        outcome = marble("train", config_file, "--out", disk / "run", *keep_all, "--set", "logging.images_every=null")
        assert outcome.code == 3, outcome.err
        assert "No space left on device" in outcome.err
        steps = sorted(p.name for p in (disk / "run" / "checkpoints").iterdir())
        assert steps, "at least one checkpoint fits"
        assert all((disk / "run" / "checkpoints" / name / "manifest.json").exists() for name in steps)
        shutil.copytree(disk / "run", tmp_path / "moved")
    finally:
        subprocess.run(["umount", disk], check=True)
    train(config_file, tmp_path / "whole")
    train(config_file, tmp_path / "moved", "--resume")
    assert lora_bytes(tmp_path / "moved") == lora_bytes(tmp_path / "whole")


def test_all_rewards_of_the_tiny_config_rise(tiny_sd3: Path, tmp_path: Path) -> None:
    """configs/tiny.yaml: on held-out prompts, paired by prompt and seed, each reward is up beyond its error."""
    train(CONFIGS / "tiny.yaml", tmp_path / "run", "--set", f"model.path={tiny_sd3}")
    outcome = marble("evaluate", tmp_path / "run", "--images", 16, "--json")
    assert outcome.code == 0, outcome.err
    weights = json.loads(outcome.out)["weights"]
    for name in ("smooth", "dim", "red"):
        pairs = [
            after["scores"][name] - before["scores"][name]
            for before, after in zip(weights["base"]["images"], weights["ema"]["images"], strict=True)
            if before["scores"][name] is not None
        ]
        gain = torch.tensor(pairs, dtype=torch.float64)
        assert gain.mean() > 3 * gain.std() / len(gain) ** 0.5, name
