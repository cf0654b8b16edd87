"""Write the mini world's prompt files: for each source one to train on and one held out.

No held-out prompt asks for what a training prompt asks for, whichever source that is of: neither in the same words nor
in others (`a cone and a marble` is `a marble and a cone`).

python -m tools.mini.prompts configs/prompts
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from marble_rl.prompts.meaning import asked_for
from tools.mini.scenes import SOURCES, Scene, draw_scene

TRAIN, HELD_OUT = 250, 150
"""Prompts of each source."""
DRAWS = 20_000
SEED = 2026


@dataclass(frozen=True)
class Split:
    """Scenes of a source, all with different captions."""

    train: list[Scene]
    held_out: list[Scene]


def splits(seed: int = SEED) -> dict[str, Split]:
    """Of every source."""
    cuts = {source: _cut(source, seed) for source in SOURCES}
    trained = {asked for cut, _ in cuts.values() for scene in cut.train for asked in _asked_for(scene)}
    return {source: Split(cut.train, _untrained(cut.held_out, spare, trained)) for source, (cut, spare) in cuts.items()}


def _cut(source: str, seed: int) -> tuple[Split, list[Scene]]:
    """Different captions of a source, cut in two whatever they ask for; and what is left."""
    dice = random.Random(f"prompts/{source}/{seed}")
    dealt = _dealt([draw_scene(source, dice) for _ in range(DRAWS)])
    tasks: dict[str, list[Scene]] = {}
    for scene in dealt[: TRAIN + HELD_OUT]:
        tasks.setdefault(_task(scene), []).append(scene)
    # Ordered by place within its task, the first part of the list has its share of every task.
    placed = [
        ((place + dice.random()) / len(task), scene) for task in tasks.values() for place, scene in enumerate(task)
    ]
    chosen = [scene for _, scene in sorted(placed, key=lambda row: row[0])]
    train, held_out = chosen[HELD_OUT:], chosen[:HELD_OUT]
    dice.shuffle(train)
    dice.shuffle(held_out)
    return Split(train, held_out), dealt[TRAIN + HELD_OUT :]


def _dealt(scenes: list[Scene]) -> list[Scene]:
    """Scenes of different captions, one of each of GenEval's tasks in turn as long as it has any left."""
    tasks: dict[str, dict[str, Scene]] = {}
    for scene in scenes:
        tasks.setdefault(_task(scene), {}).setdefault(scene.caption, scene)
    rows = zip_longest(*(task.values() for task in tasks.values()))
    return [scene for row in rows for scene in row if scene is not None]


def _task(scene: Scene) -> str:
    return str(scene.metadata.get("tag", ""))


def _untrained(held_out: list[Scene], spare: list[Scene], trained: set[str]) -> list[Scene]:
    """In place of each scene that training asks for, another, of the same task as long as there is one.

    The others keep their places, and with them the noise that evaluations start from.
    """
    asked = trained | {words for scene in held_out for words in _asked_for(scene)}
    chosen = []
    for scene in held_out:
        if _asked_for(scene) & trained:
            free = [other for other in spare if not _asked_for(other) & asked]
            scene = next((other for other in free if _task(other) == _task(scene)), free[0])
            asked |= _asked_for(scene)
        chosen.append(scene)
    return chosen


def _asked_for(scene: Scene) -> set[str]:
    return asked_for(scene.caption, scene.metadata)


def write_prompts(folder: Path) -> None:
    """``mini-SOURCE.jsonl`` and ``mini-SOURCE-heldout.jsonl``, one prompt with its metadata a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, split in splits().items():
        for name, scenes in ((source, split.train), (f"{source}-heldout", split.held_out)):
            lines = [json.dumps({"prompt": scene.caption, **scene.metadata}) for scene in scenes]
            (folder / f"mini-{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: Annotated[Path, typer.Argument(help="Where to write the six files.")]) -> None:
    """Write the mini world's prompt files."""
    write_prompts(folder)


if __name__ == "__main__":
    typer.run(main)
