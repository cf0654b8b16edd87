"""Work trees of this repository at two revisions, for comparisons of old code with new."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

HERE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Tree:
    """A work tree whose code runs in processes of their own."""

    root: Path

    def python(self, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env=environment, check=True, stdout=subprocess.DEVNULL
        )

    def marble(self, *arguments: str) -> None:
        typer.echo(f"[{self.root.name}] marble {' '.join(arguments)}", err=True)
        self.python("-m", "marble_rl.cli", *arguments)


@contextmanager
def work_tree(name: str, scratch: Path) -> Iterator[Tree]:
    """A folder, or a checkout of a git revision that is removed in the end."""
    if Path(name).is_dir():
        yield Tree(Path(name).resolve())
        return
    folder = scratch / "old"
    subprocess.run(["git", "-C", str(HERE), "worktree", "add", "--quiet", "--detach", str(folder), name], check=True)
    try:
        yield Tree(folder)
    finally:
        subprocess.run(["git", "-C", str(HERE), "worktree", "remove", "--force", str(folder)], check=True)
