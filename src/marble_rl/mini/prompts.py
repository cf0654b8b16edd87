"""Write the mini world's prompt files: for each source one to train on and one held out, no caption in both.

python -m marble_rl.mini.prompts configs/prompts
"""

from __future__ import annotations

import json
import random
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from marble_rl.mini.scenes import SOURCES, Scene, draw_scene

TRAIN, HELD_OUT = 250, 150
"""Prompts of each source."""
DRAWS = 20_000
SEED = 2026


def split(source: str, seed: int = SEED) -> tuple[list[Scene], list[Scene]]:
    """Different captions of a source: those to train on, and those held out."""
    dice = random.Random(f"prompts/{source}/{seed}")
    tasks = _by_task([draw_scene(source, dice) for _ in range(DRAWS)], TRAIN + HELD_OUT)
    # Ordered by place within its task, the first part of the list has its share of every task.
    placed = [((place + dice.random()) / len(task), scene) for task in tasks for place, scene in enumerate(task)]
    chosen = [scene for _, scene in sorted(placed, key=lambda row: row[0])]
    train, held_out = chosen[HELD_OUT:], chosen[:HELD_OUT]
    dice.shuffle(train)
    dice.shuffle(held_out)
    return train, held_out


def _by_task(scenes: list[Scene], count: int) -> list[list[Scene]]:
    """``count`` scenes of different captions by GenEval's task, equally many of each as long as it has any left."""
    tasks: dict[str, dict[str, Scene]] = {}
    for scene in scenes:
        tasks.setdefault(scene.metadata.get("tag", ""), {}).setdefault(scene.caption, scene)
    rows = zip_longest(*(task.values() for task in tasks.values()))
    chosen = [scene for row in rows for scene in row if scene is not None][:count]
    return [[scene for scene in chosen if scene.metadata.get("tag", "") == tag] for tag in tasks]


def write_prompts(folder: Path) -> None:
    """``mini-SOURCE.jsonl`` and ``mini-SOURCE-heldout.jsonl``, one prompt with its metadata a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        for name, scenes in zip((source, f"{source}-heldout"), split(source), strict=True):
            lines = [json.dumps({"prompt": scene.caption, **scene.metadata}) for scene in scenes]
            (folder / f"mini-{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: Annotated[Path, typer.Argument(help="Where to write the six files.")]) -> None:
    """Write the mini world's prompt files."""
    write_prompts(folder)


if __name__ == "__main__":
    typer.run(main)
