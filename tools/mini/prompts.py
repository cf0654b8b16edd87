"""Write the mini world's prompt files: for each source one to train on and one held out.

No held-out prompt asks for what a training prompt asks for, whichever source that is of: neither in the same words nor
in others (`a cone and a marble` is `a marble and a cone`).

python -m tools.mini.prompts configs/prompts
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from marble_rl.prompts.meaning import asked_for
from tools.mini.scenes import SOURCES, draw_scene

TRAIN, HELD_OUT = 250, 150
"""Prompts of each source."""
DRAWS = 20_000
SEED = 2026


class Captioned(Protocol):
    """A scene or a clip."""

    @property
    def caption(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class World:
    """What prompts are drawn from."""

    name: str
    """Its files are NAME-SOURCE.jsonl and NAME-SOURCE-heldout.jsonl."""
    sources: Sequence[str]
    draw: Callable[[str, random.Random], Captioned]
    task: Callable[[Captioned], str]
    """Which of its source's tasks a caption sets; they are spread evenly."""


MINI = World("mini", SOURCES, draw_scene, lambda scene: str(scene.metadata.get("tag", "")))


@dataclass(frozen=True)
class Split:
    """Scenes of a source, all with different captions."""

    train: list[Captioned]
    held_out: list[Captioned]


def splits(seed: int = SEED, world: World = MINI) -> dict[str, Split]:
    """Of every source."""
    cuts = {source: _cut(world, source, seed) for source in world.sources}
    trained = {asked for cut, _ in cuts.values() for scene in cut.train for asked in _asked_for(scene)}
    return {
        source: Split(cut.train, _untrained(cut.held_out, spare, trained, world.task))
        for source, (cut, spare) in cuts.items()
    }


def _cut(world: World, source: str, seed: int) -> tuple[Split, list[Captioned]]:
    """Different captions of a source, cut in two whatever they ask for; and what is left."""
    dice = random.Random(f"prompts/{source}/{seed}")
    dealt = _dealt([world.draw(source, dice) for _ in range(DRAWS)], world.task)
    tasks: dict[str, list[Captioned]] = {}
    for scene in dealt[: TRAIN + HELD_OUT]:
        tasks.setdefault(world.task(scene), []).append(scene)
    # Ordered by place within its task, the first part of the list has its share of every task.
    placed = [
        ((place + dice.random()) / len(task), scene) for task in tasks.values() for place, scene in enumerate(task)
    ]
    chosen = [scene for _, scene in sorted(placed, key=lambda row: row[0])]
    train, held_out = chosen[HELD_OUT:], chosen[:HELD_OUT]
    dice.shuffle(train)
    dice.shuffle(held_out)
    return Split(train, held_out), dealt[TRAIN + HELD_OUT :]


def _dealt(scenes: list[Captioned], task_of: Callable[[Captioned], str]) -> list[Captioned]:
    """Scenes of different captions, one of each task in turn as long as it has any left."""
    tasks: dict[str, dict[str, Captioned]] = {}
    for scene in scenes:
        tasks.setdefault(task_of(scene), {}).setdefault(scene.caption, scene)
    rows = zip_longest(*(task.values() for task in tasks.values()))
    return [scene for row in rows for scene in row if scene is not None]


def _untrained(
    held_out: list[Captioned], spare: list[Captioned], trained: set[str], task_of: Callable[[Captioned], str]
) -> list[Captioned]:
    """In place of each scene that training asks for, another, of the same task as long as there is one.

    The others keep their places, and with them the noise that evaluations start from.
    """
    asked = trained | {words for scene in held_out for words in _asked_for(scene)}
    chosen = []
    for scene in held_out:
        if _asked_for(scene) & trained:
            free = [other for other in spare if not _asked_for(other) & asked]
            scene = next((other for other in free if task_of(other) == task_of(scene)), free[0])
            asked |= _asked_for(scene)
        chosen.append(scene)
    return chosen


def _asked_for(scene: Captioned) -> set[str]:
    return asked_for(scene.caption, scene.metadata)


def write_prompts(folder: Path, world: World = MINI) -> None:
    """``NAME-SOURCE.jsonl`` and ``NAME-SOURCE-heldout.jsonl``, one prompt with its metadata a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, split in splits(world=world).items():
        for name, scenes in ((source, split.train), (f"{source}-heldout", split.held_out)):
            lines = [json.dumps({"prompt": scene.caption, **scene.metadata}) for scene in scenes]
            (folder / f"{world.name}-{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: Annotated[Path, typer.Argument(help="Where to write the six files.")]) -> None:
    """Write the mini world's prompt files."""
    write_prompts(folder)


if __name__ == "__main__":
    typer.run(main)
