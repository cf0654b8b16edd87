"""One thread, helpers importable, and a tiny random SD3 pipeline in diffusers' real format."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MKL_CBWR"] = "AUTO"  # as the command line does, but here torch is used before it
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))  # tools/
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: commands under test must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import torch

from marble_rl.models.cpu_products import use_onednn

torch.set_num_threads(1)
use_onednn()  # as the first model does, so that the order of tests does not matter


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the pipeline."""
    from built_once import built_once
    from tools.tiny import build_tiny_sd3

    return built_once(tmp_path_factory, "tiny-sd3", build_tiny_sd3)


@pytest.fixture(scope="session")
def finished_run(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `marble train` makes of `config_file`. Tests that change it take a copy."""
    from built_once import built_once
    from runs import train, write_config

    def build(folder: Path) -> None:
        train(write_config(folder / "config.yaml", tiny_sd3), folder / "run")

    return built_once(tmp_path_factory, "finished-run", build) / "run"


@pytest.fixture
def config_file(tiny_sd3: Path, tmp_path: Path) -> Path:
    """A small run on it: 8 steps, three rewards, one of which applies to half of the prompts only."""
    from runs import write_config

    return write_config(tmp_path / "config.yaml", tiny_sd3)
