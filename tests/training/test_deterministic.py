"""`trainer.deterministic`: torch's deterministic kernels while the run trains, and a message where there is none."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from marble_rl.config import load_config
from marble_rl.devices import deterministic_kernels
from marble_rl.errors import RunStopped
from marble_rl.training.failures import explained
from marble_rl.training.trainer import Trainer


def test_it_is_asked_for_while_the_run_trains(config_file: Path, tmp_path: Path) -> None:
    config = load_config(config_file, ["trainer.deterministic=true", "trainer.steps=1"])
    printed: dict[str, bool] = {}

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            printed[text] = torch.are_deterministic_algorithms_enabled()
            return super().write(text)

    Trainer(config, tmp_path / "run", console=Console(file=Screen())).train()
    assert [asked for text, asked in printed.items() if "step 1/1" in text] == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_such_a_kernel_stops_the_run_with_the_setting(config_file: Path) -> None:
    def train(wanted: bool) -> None:
        with deterministic_kernels(wanted), explained(load_config(config_file), lambda: "gradients", lockstep=False):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))

    train(False)
    with pytest.raises(RunStopped, match=r"trainer\.deterministic: put_.* Set it to false, and continue with --resume"):
        train(True)
