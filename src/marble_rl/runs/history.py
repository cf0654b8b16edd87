"""history.json: every start of a run, with what changed since the start before it.

config.json holds the settings of the last start only. A run that was resumed with another learning rate has two, and
the report and the model card say so.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from marble_rl import __version__
from marble_rl.storage import Record

PACKAGES = ("torch", "diffusers", "transformers", "peft")
GIT_TIMEOUT = 10.0
"""Seconds."""


class Change(BaseModel):
    """A setting that differs from that of the start before."""

    key: str
    before: Any
    after: Any
    free: bool
    """It has no effect on the weights."""

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r}, now {self.after!r}"


class Start(BaseModel):
    """One start of the run, new or resumed."""

    time: str
    """UTC, ISO 8601"""
    step: int
    """Updates that were done before"""
    command: str
    ranks: int
    device: str
    versions: dict[str, str]
    commit: str | None
    """Git commit of the folder in which the command was given; ends in -dirty where files differ from it"""
    changes: list[Change] = []


class History(Record):
    """All starts of a run, the first one first."""

    kind: ClassVar[str] = "a history of a run"
    fix: ClassVar[str] = "Delete it; a new one begins with the next start"

    starts: Annotated[list[Start], Field(min_length=1)]

    @property
    def changes(self) -> list[str]:
        """One sentence for every setting that changed the rest of the run."""
        return [
            f"After step {start.step}, {change}."
            for start in self.starts
            for change in start.changes
            if not change.free
        ]

    @property
    def software(self) -> str:
        """The package versions of the last start, and those of earlier ones that differ."""
        *earlier, last = self.starts
        parts = []
        for name, version_ in last.versions.items():
            others = {start.versions.get(name, "?") for start in earlier} - {version_}
            parts.append(f"{name} {version_}" + (f" (before: {', '.join(sorted(others))})" if others else ""))
        return ", ".join(parts)


def add_start(file: Path, step: int, ranks: int, device: str, changes: Sequence[Change]) -> None:
    """Append this start to the file."""
    earlier = History.read(file).starts if file.exists() else []
    start = Start(
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        step=step,
        command=_command(),
        ranks=ranks,
        device=device,
        versions=package_versions(),
        commit=_commit(),
        changes=list(changes),
    )
    History(starts=[*earlier, start]).write(file)


def package_versions() -> dict[str, str]:
    """Of marble, Python and the packages that change results."""
    versions = {"marble": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return versions


def _command() -> str:
    program = Path(sys.argv[0]).name
    return shlex.join(["marble" if program == "__main__.py" else program, *sys.argv[1:]])


def _commit() -> str | None:
    """Of the current folder; None where that is no git repository, or git is not installed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match", ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
