"""A comparison in the form of `marble compare`: one method is partly better, one has a hostile name, one crashed."""

from __future__ import annotations

import json
from pathlib import Path


def _row(method: str, level: float, seeds: list[int], differences: tuple[float, ...] = ()) -> dict[str, object]:
    def interval(mean: float) -> dict[str, object]:
        return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "n": len(seeds), "over": "seeds"}

    names = ["ocr", "taste", "composite"]
    return {
        "method": method,
        "about": f"about {method}",
        "seeds": seeds,
        "figures": {name: interval(level) for name in names},
        "differences": {name: interval(mean) for name, mean in zip(names, differences, strict=False)},
        "train_seconds": 60.0,
        "training": {"heldout/min_cos": 0.125} if method == "marble" else {},
    }


def write_comparison(folder: Path) -> Path:
    tree = {
        "rewards": ["ocr", "taste"],
        "held_out": ["taste"],
        "against": "weighted_sum",
        "rows": [
            _row("weighted_sum", 0.5, [0, 1]),
            _row("marble", 0.9, [0, 1], (0.4, -0.4, 0.0)),
            _row("<i>", 0.1, [0], (0.0,)),
        ],
        "holes": [{"method": "gdpo", "seed": 3, "stage": "train", "exit_code": 3, "last_line": "<b>full</b>"}],
        "prompts": 8,
        "images_per_prompt": 2,
    }
    (folder / "compare.json").write_text(json.dumps(tree))
    return folder
