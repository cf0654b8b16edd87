"""What is attacked: a tiny pipeline, a config for it, a finished training, its LoRA, and a comparison."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from tools.campaign.process import in_fork, run
from tools.tiny import build_tiny_sd3

STEPS = 6
LATER = 8
"""Steps of the training that a damaged run is resumed to."""
LORA = Path("lora/pytorch_lora_weights.safetensors")
SCORES = Path("evaluation/scores.json")
PROMPT = "a red cup"
COMPARED = ("--methods", "base,weighted_sum", "--seeds", "0", "--set", "trainer.steps=1")


class World:
    """Everything is made when it is asked for the first time, and kept in ``folder`` for later campaigns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pipeline = folder / "pipeline"
        self.tree = config_tree(self.pipeline)
        self.config = folder / "config.yaml"
        if not self.config.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            in_fork(lambda: build_tiny_sd3(self.pipeline))
            write_prompts(folder)
            self.config.write_text(yaml.safe_dump(self.tree))

    def run(self) -> Path:
        """A training that is finished after ``STEPS`` steps, and evaluated."""
        run = self.folder / "run"
        if not (run / SCORES).exists():
            self._anew("train", self.config.name, "--out", out=run)
            self._must("evaluate", "run")
        return run

    def scores(self) -> dict[str, Any]:
        """What evaluating that run gives."""
        scores: dict[str, Any] = json.loads((self.run() / SCORES).read_text())
        return scores

    def later(self) -> bytes | None:
        """The LoRA after ``LATER`` steps of the same training without an attack."""
        run = self.folder / "later"
        if lora_of(run) is None:
            self._anew("train", self.config.name, "--set", f"trainer.steps={LATER}", "--out", out=run)
        return lora_of(run)

    def comparison(self) -> Path:
        """A finished comparison."""
        folder, config = self.folder / "comparison", self.folder / "comparison.yaml"
        if not (folder / "compare.json").exists():
            ours = ("guard", "priority")
            rewards = [{k: v for k, v in reward.items() if k not in ours} for reward in self.tree["rewards"]]
            config.write_text(yaml.safe_dump({**self.tree, "rewards": rewards}))
            self._anew("compare", config.name, *COMPARED, "--out", out=folder)
        return folder

    def _anew(self, *command: str, out: Path) -> None:
        shutil.rmtree(out, ignore_errors=True)  # of a campaign that was interrupted
        self._must(*command, out.name)

    def _must(self, *command: str) -> None:
        ended = run(command, self.folder, seconds=300)
        if ended.code:
            raise RuntimeError(f"marble {' '.join(command)} failed before any attack:\n{ended.text}")


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
