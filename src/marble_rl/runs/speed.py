"""How long a step took in an earlier run with the same settings."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from marble_rl.config import RunConfig
from marble_rl.errors import InputError
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.layout import wall_seconds
from marble_rl.runs.metrics_lines import read_lines
from marble_rl.storage import read_json

SECTIONS = ("model", "lora", "rollout", "rewards", "loss", "balance")
"""Of the config: what the time of a step depends on, with trainer.micro_batch"""


def seconds_per_step(config: RunConfig, runs: Path) -> tuple[float, Path] | None:
    """Mean over the steps of the newest run in the folder ``runs`` that has the same settings, and that run; None
    without one."""
    folders = [RunFolder(path.parent) for path in runs.glob("*/config.json")]
    for folder in sorted((f for f in folders if f.metrics.exists()), key=lambda f: -f.metrics.stat().st_mtime):
        try:
            if _settings(read_json(folder.config)) != _settings(config.model_dump(mode="json")):
                continue
            lines = read_lines(folder.metrics)
        except (InputError, AttributeError):  # another program's file
            continue
        if lines:
            return statistics.fmean(wall_seconds(line) for line in lines), folder.path
    return None


def _settings(tree: Any) -> list[Any]:
    if not isinstance(tree, dict):
        return []
    return [*(tree.get(section) for section in SECTIONS), (tree.get("trainer") or {}).get("micro_batch")]
