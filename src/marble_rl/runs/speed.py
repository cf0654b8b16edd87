"""How long a step took in an earlier run with the same settings."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from marble_rl.config import RunConfig
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.layout import wall_seconds

SECTIONS = ("model", "lora", "rollout", "rewards", "loss", "balance")
"""Of the config: what the time of a step depends on, with trainer.micro_batch"""


def seconds_per_step(config: RunConfig, runs: Path) -> tuple[float, Path] | None:
    """Mean over the steps of the newest run in the folder ``runs`` that has the same settings, and that run; None
    without one."""
    folders = [RunFolder(path.parent) for path in runs.glob("*/config.json")]
    for folder in sorted((f for f in folders if f.metrics.exists()), key=lambda f: -f.metrics.stat().st_mtime):
        try:
            same = _settings(json.loads(folder.config.read_text())) == _settings(config.model_dump(mode="json"))
            rows = folder.metrics.read_text().splitlines() if same else []
        except (OSError, ValueError, AttributeError, RecursionError):  # another program's file
            continue
        lines = [line for row in rows if (line := _line(row)) is not None]
        if lines:
            return statistics.fmean(wall_seconds(line) for line in lines), folder.path
    return None


def _line(row: str) -> dict[str, float] | None:
    """None for a line that was cut short by a crash."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _settings(tree: Any) -> list[Any]:
    if not isinstance(tree, dict):
        return []
    return [*(tree.get(section) for section in SECTIONS), (tree.get("trainer") or {}).get("micro_batch")]
