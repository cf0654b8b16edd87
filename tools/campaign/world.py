"""What is attacked: a tiny pipeline, a config for it, a finished training, its LoRA, and a comparison."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.campaign.process import run
from tools.tiny import build_tiny_sd3

STEPS = 6
LATER = 8
"""Steps of the training that a damaged run is resumed to."""
LORA = Path("lora/pytorch_lora_weights.safetensors")
SCORES = Path("evaluation/scores.json")
PROMPT = "a red cup"


@dataclass(frozen=True)
class World:
    folder: Path
    tree: dict[str, Any]
    """The config."""
    later: bytes | None
    """LoRA after ``LATER`` steps of the same training without an attack."""
    scores: dict[str, Any]
    """What evaluating the finished run gives."""

    @property
    def pipeline(self) -> Path:
        return self.folder / "pipeline"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def run(self) -> Path:
        """Finished after ``STEPS`` steps, evaluated, with checkpoints."""
        return self.folder / "run"

    def comparison(self) -> Path:
        """A finished comparison, made when it is asked for the first time: each of its jobs is a process that imports
        torch."""
        folder, file = self.folder / "comparison", self.folder / "comparison.yaml"
        if not (folder / "compare.json").exists():
            plain = [
                {k: v for k, v in reward.items() if k not in ("guard", "priority")} for reward in self.tree["rewards"]
            ]
            file.write_text(yaml.safe_dump({**self.tree, "rewards": plain}))
            jobs = ("--methods", "base,weighted_sum", "--seeds", "0", "--set", "trainer.steps=1")
            _must("compare", file.name, *jobs, "--out", folder.name, folder=self.folder)
        return folder


def lora_of(run: Path) -> bytes | None:
    """The LoRA that a training wrote; None if it wrote none."""
    file = run / LORA
    return file.read_bytes() if file.is_file() else None


def config_tree(pipeline: Path) -> dict[str, Any]:
    """A training of seconds, with most kinds of settings in it."""
    return {
        "model": {"path": str(pipeline), "text_length": 16},
        "lora": {"rank": 2, "alpha": 8},
        "prompts": {
            "train": [
                {"name": "things", "file": "things.txt"},
                {"name": "colours", "file": "colours.jsonl", "share": 1.0},
            ],
            "heldout": [{"name": "other", "texts": ["a red kite", "two blue cups"]}],
        },
        "rewards": [
            {"name": "small", "type": "jpeg_compressibility", "clip": [-100.0, 100.0]},
            {"name": "bright", "type": "brightness", "guard": {"floor": -0.5}},
            {"name": "colour", "type": "colour", "priority": 2.0},
            {"name": "tone", "type": "brightness", "held_out": True},
        ],
        "rollout": {"groups": 4, "group_size": 2, "steps": 2, "solver": "dpm2", "old_policy": "default"},
        "loss": {"type": "nft", "timesteps_per_sample": 1, "kl_weight": 0.01},
        "balance": {"type": "fair", "momentum": 0.9},
        "optimizer": {"lr": 0.01, "schedule": "constant"},
        "trainer": {"steps": STEPS, "save_every": 2, "keep_checkpoints": 3, "micro_batch": 8, "seed": 3},
        "evaluation": {"steps": 2, "batch_size": 4, "images_per_prompt": 1},
        "logging": {"images_every": 3},
    }


def write_prompts(folder: Path) -> None:
    (folder / "things.txt").write_text("a marble\na block\na sign\na kite\n")
    lines = [{"prompt": "a red cup"}, {"prompt": "a blue cup", "colour": "blue"}, {"prompt": "a green hat"}]
    (folder / "colours.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def build(folder: Path) -> World:
    """Build everything in ``folder``, or take what a finished build left there."""
    done = folder / "done"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        build_tiny_sd3(folder / "pipeline")
        write_prompts(folder)
        (folder / "config.yaml").write_text(yaml.safe_dump(config_tree(folder / "pipeline")))
        later = ("--set", f"trainer.steps={LATER}")
        _must("train", "config.yaml", "--out", "run", folder=folder)
        _must("evaluate", "run", folder=folder)
        _must("train", "config.yaml", *later, "--out", "later", folder=folder)
        done.touch()
    return World(
        folder,
        config_tree(folder / "pipeline"),
        lora_of(folder / "later"),
        json.loads((folder / "run" / SCORES).read_text()),
    )


def _must(*command: str, folder: Path) -> None:
    ended = run(command, folder, seconds=300)
    if ended.code:
        raise RuntimeError(f"marble {' '.join(command)} failed before any attack:\n{ended.text}")
