from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config with prompt files, which no model is loaded for."""
    (tmp_path / "prompts.txt").write_text("a marble\na kite\n")
    text = (
        "model: {path: mini}\nprompts: {train: [{name: things, file: prompts.txt}]}\n"
        "rewards: [{name: a, type: brightness}, {name: b, type: jpeg_compressibility}]\n"
        "rollout: {groups: 2}\ntrainer: {steps: 8}\nevaluation: {seed: 10}\n"
    )
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path / "config.yaml"
