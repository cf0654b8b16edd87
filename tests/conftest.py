"""One thread, helpers importable, and a tiny random SD3 pipeline in diffusers' real format."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))  # tools/
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: commands under test must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the pipeline; built once per worker."""
    from tools.tiny import build_tiny_sd3

    folder = tmp_path_factory.mktemp("models") / "tiny-sd3"
    build_tiny_sd3(folder)
    return folder


@pytest.fixture
def config_file(tiny_sd3: Path, tmp_path: Path) -> Path:
    """A small run on it: 8 steps, three rewards, one of which applies to half of the prompts only."""
    from runs import write_config

    return write_config(tmp_path / "config.yaml", tiny_sd3)
