"""A comparison in the form of `marble compare`: one method is partly better, one has a hostile name, one crashed."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from marble_rl.compare.job_result import JobResult
from marble_rl.compare.table import Comparison, Hole, Row
from marble_rl.intervals import Interval
from marble_rl.runs.scores import ImageScores, KeptPicture, Scores, WeightsScores


def _row(method: str, level: float, seeds: list[int], differences: tuple[float, ...] = ()) -> Row:
    def interval(mean: float) -> Interval:
        return Interval(mean, mean - 0.1, mean + 0.1, len(seeds), "seeds")

    names = ["ocr", "taste", "composite"]
    return Row(
        method=method,
        about=f"about {method}",
        overrides=[],
        seeds=seeds,
        figures={name: interval(level) for name in names},
        z={"ocr": level, "taste": level},
        differences={name: interval(mean) for name, mean in zip(names, differences, strict=False)},
        steps=60,
        images_per_step=96,
        train_seconds=60.0,
        seconds_per_step=1.0,
        training={"heldout/min_cos": 0.125} if method == "marble" else {},
    )


def write_comparison(folder: Path) -> Path:
    rows = [
        _row("weighted_sum", 0.5, [0, 1]),
        _row("marble", 0.9, [0, 1], (0.4, -0.4, 0.0)),
        _row("<i>", 0.1, [0], (0.0,)),
    ]
    Comparison(
        rewards=["ocr", "taste"],
        held_out=["taste"],
        left_out=[],
        against="weighted_sum",
        rows=rows,
        holes=[Hole("gdpo", 3, "train", 3, "<b>full</b>")],
        prompts=8,
        prompts_are="held-out",
        images_per_prompt=2,
        versions=[],
    ).write(folder / "compare.json")
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
        image = ImageScores("a <sign> that says hello", "signs", 0, 0, dict(given))
        Scores(
            step=6,
            held_out_rewards=["taste"],
            differences={},
            pictures=[KeptPicture(0, {"ema": "images/0-ema.webp"})],
            weights={"ema": WeightsScores(given, [image])},
        ).write(job / "evaluation" / "scores.json")
        JobResult(
            method=method,
            about=f"about {method}",
            seed=seed,
            overrides=[],
            config={"balance": {"type": method}},
            config_hash="",
            versions={},
            failed=None,
            means={"taste": 1.0},
            prompts=1,
            per_prompt={"taste": [1.0]},
        ).write(job.with_suffix(".json"))
