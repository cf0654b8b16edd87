"""Rewards that misbehave in a training: the run stops with the reward named, or goes on with the right scores."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tools.campaign.attack import BAD_INPUT, DONE, STOPPED, Attack, Seeded, faults_of
from tools.campaign.hostile_rewards import HARMLESS, STOPPING
from tools.campaign.process import Ended, run
from tools.campaign.world import World, lora_of

RAISING = (
    "raises",
    "raises 5 MB",
    "raises without text",
    "sys.exit(0)",
    "KeyboardInterrupt",
    "BaseException",
    "recursion",
)
"""What can happen outside of `score`, too."""
STEPS = 2
NAME = "culprit"


def misbehaving(world: World, seeded: Seeded) -> Attack:
    rng = seeded.rng
    right_lora, right_log = _undisturbed(world)
    if rng.random() < 0.25:
        what, where = rng.choice(RAISING), rng.choice(("constructor", "load", "applies_to", "import"))
    else:
        what, where = rng.choice((*STOPPING, *HARMLESS)), "score"
    params = {"what": what, "where": where, "after": rng.choice((0, 0, 1, 5))}
    ended = _trained(world, seeded.folder, params, _module(seeded.folder, rng) if where == "import" else None)
    allowed = (DONE,) if what in HARMLESS else (STOPPED,) if where == "score" else (BAD_INPUT, STOPPED)
    faults = faults_of(ended, allowed)
    if ended.code in (BAD_INPUT, STOPPED) and NAME not in ended.text:
        faults.append("does not name the reward")
    log = _log(seeded.folder)
    if log is None or log != right_log[: len(log)]:
        faults.append("other scores than without the fault, or no JSON")
    if ended.code == DONE and lora_of(seeded.folder / "run") != right_lora:
        faults.append("other weights than without the fault")
    return Attack(f"{what} at {where}, from call {params['after']} on", ended, faults)


def _module(folder: Path, rng: Random) -> str:
    """A module that cannot be imported; the import path of a reward in it."""
    lines = (
        "import sys; sys.exit(0)",
        "raise KeyboardInterrupt",
        "raise BaseException('no')",
        "1 / 0",
        "def score(:",
        "\0",
    )
    (folder / "hostile_module.py").write_text(rng.choice(lines))
    return "hostile_module:score"


def _trained(world: World, folder: Path, params: dict[str, Any], type_: str | None = None) -> Ended:
    reward = {"name": NAME, "type": "tools.campaign.hostile_rewards:Bad", "params": params, "timeout": 2, "retries": 0}
    if type_ is not None:
        reward = {"name": NAME, "type": type_}
    tree = {
        **world.tree,
        "rewards": [{"name": "small", "type": "jpeg_compressibility"}, reward],
        "prompts": {"train": [{"name": "things", "texts": ["a marble", "a block", "a sign", "a kite"]}]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return run(["train", "config.yaml", "--set", f"trainer.steps={STEPS}", "--out", "run"], folder)


def _undisturbed(world: World) -> tuple[bytes | None, list[dict[str, float]]]:
    """LoRA and scores of the training in which the reward behaves."""
    folder = world.folder / "rewards"
    folder.mkdir(exist_ok=True)
    if lora_of(folder / "run") is None:
        ended = _trained(world, folder, {})
        if ended.code:
            raise RuntimeError(f"a training without an attack failed:\n{ended.text}")
    return lora_of(folder / "run"), _log(folder) or []


def _log(folder: Path) -> list[dict[str, float]] | None:
    """The rewards in the log; None if a line of it is not strict JSON."""
    file = folder / "run" / "metrics.jsonl"
    if not file.exists():
        return []

    def refuse(constant: str) -> float:
        raise ValueError(constant)

    try:
        lines = [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]
    except ValueError:
        return None
    return [{key: value for key, value in line.items() if key.startswith("reward/")} for line in lines]
