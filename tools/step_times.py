"""How much faster is a training step than at another revision?

    python -m tools.step_times e5547e0
    python -m tools.step_times OLD --config configs/mini-rare.yaml --set 'balance={type: fair}' --rounds 5

In turn, both trees train the config for few and for more steps. CPU times of the processes are subtracted, so that
loading is not counted, and compared within a round. The first step samples before anything is trained: its rewards must
agree up to rounding, since both trees sample the same pictures.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tools.work_trees import HERE, Tree, work_tree

FEW = 2
REWARD = "reward/"


def step_time(tree: Tree, out: Path, config: str, settings: list[str], steps: int) -> tuple[float, dict[str, float]]:
    """CPU seconds of a step, and the mean rewards of the first one."""
    few, more = (_train(tree, out / str(count), config, settings, count) for count in (FEW, FEW + steps))
    first = json.loads((out / str(FEW) / "metrics.jsonl").read_text().splitlines()[0])
    return (more - few) / steps, {key: value for key, value in first.items() if key.startswith(REWARD)}


def _train(tree: Tree, out: Path, config: str, settings: list[str], steps: int) -> float:
    """CPU seconds of the whole process and its children."""
    chosen = [word for setting in (*settings, f"trainer.steps={steps}") for word in ("--set", setting)]
    before = os.times()
    tree.marble("train", config, "--out", str(out), *chosen)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main(
    old: Annotated[str, typer.Argument(help="Folder of another work tree, or a git revision.")],
    config: Annotated[str, typer.Option(help="A config that both trees have.")] = "configs/mini-study.yaml",
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting of both; may be repeated.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Comparisons.")] = 3,
) -> None:
    """Compare the CPU time of a training step at two revisions."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder, work_tree(old, Path(folder)) as tree:
        for i in range(rounds):
            before, old_rewards = step_time(tree, Path(folder) / f"{i}-old", config, set_ or [], steps)
            now, rewards = step_time(Tree(HERE), Path(folder) / f"{i}-new", config, set_ or [], steps)
            ratios.append(before / now)
            typer.echo(f"round {i + 1}: {before:.2f} s -> {now:.2f} s of CPU a step, {before / now:.2f}x")
        largest = max(abs(rewards[key] - value) for key, value in old_rewards.items())
    typer.echo(f"median {statistics.median(ratios):.2f}x; rewards of the first step differ by at most {largest:.1e}")


if __name__ == "__main__":
    typer.run(main)
