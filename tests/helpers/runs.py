"""Helpers that drive marble through its command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MARBLE = [sys.executable, "-m", "marble_rl.cli"]
TESTS = Path(__file__).parent


def base_config(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "text_length": 16},
        "lora": {"rank": 2, "alpha": 8},
        "prompts": {
            "train": [
                {"name": "things", "texts": ["a marble", "a block", "a sign", "a kite"]},
                {"name": "colours", "texts": ["a red cup", "a blue cup", "a green hat"]},
            ]
        },
        "rewards": [
            {"name": "small", "type": "jpeg_compressibility"},
            {"name": "bright", "type": "brightness"},
            {"name": "colour", "type": "colour"},
        ],
        "rollout": {"groups": 4, "group_size": 4, "steps": 3, "updates": 2},
        "loss": {"timesteps_per_sample": 1},
        "balance": {"type": "marble", "refresh_every": 3},
        "optimizer": {"lr": 0.01},
        "trainer": {"steps": 8, "save_every": 3, "micro_batch": 16},
        "evaluation": {"steps": 2, "batch_size": 4},
        "logging": {"images_every": 4},
    }


def write_config(path: Path, model: Path, **changes: Any) -> Path:
    """The base config with whole sections replaced."""
    path.write_text(yaml.safe_dump({**base_config(model), **changes}))
    return path


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def marble(*arguments: object) -> Outcome:
    """Run the command line in this process: the same entry point, without seconds of imports."""
    from marble_rl.cli import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Run the command line in a process of its own, for signals and limits."""
    return subprocess.Popen(
        [*MARBLE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS,
        **options,
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until ``step`` optimizer steps are logged, or the process ended by itself."""
    file = run / "metrics.jsonl"
    while process.poll() is None:
        if file.exists() and len(file.read_text().splitlines()) >= step:
            return
        time.sleep(0.002)


def train(config: Path, out: Path, *arguments: object) -> Outcome:
    outcome = marble("train", config, "--out", out, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def lora_bytes(run: Path) -> bytes:
    files = sorted((run / "lora").glob("*.safetensors"))
    assert files
    return b"".join(file.read_bytes() for file in files)


def metrics(run: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what depends on the process: wall-clock times, memory, and who scored what when."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    of_the_process = ("time/", "memory/", "scoring/")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(of_the_process)} for line in lines]
