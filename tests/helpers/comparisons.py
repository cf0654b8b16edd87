"""A comparison in the form of `marble compare`: one method is partly better, one has a hostile name, one crashed."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image


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
        "claims": [{"claim": "It beats <i>", "paper": "+1 < +2", "verdict": "not confirmed", "text": "0 & 1"}],
    }
    (folder / "compare.json").write_text(json.dumps(tree))
    return folder


def write_jobs(folder: Path) -> None:
    """What the jobs of it left: runs of six steps with their memory, and an evaluation with a picture."""
    for method, seed in (("weighted_sum", 0), ("weighted_sum", 1), ("marble", 0), ("<i>", 0)):
        job = folder / "jobs" / f"{method.strip('<>')}-seed{seed}"
        (job / "run").mkdir(parents=True)
        lines = [{"step": step, "reward/ocr": 0.1 * step + seed, "memory/peak_mb": 700.0 + seed} for step in range(6)]
        (job / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (job / "evaluation" / "images").mkdir(parents=True)
        Image.new("RGB", (64, 64), (40 * seed, 90, 160)).save(job / "evaluation" / "images" / "0-ema.webp")
        given = {"ocr": 0.5, "taste": 4.0}
        image = {"source": "signs", "index": 0, "prompt": "a <sign> that says hello", "scores": given}
        scores = {
            "step": 6,
            "held_out_rewards": ["taste"],
            "weights": {"ema": {"means": given, "images": [image]}},
            "differences": {},
            "pictures": [{"row": 0, "files": {"ema": "images/0-ema.webp"}}],
        }
        (job / "evaluation" / "scores.json").write_text(json.dumps(scores))
        result = {"method": method, "seed": seed, "failed": None, "config": {"balance": {"type": method}}}
        job.with_suffix(".json").write_text(json.dumps(result))
