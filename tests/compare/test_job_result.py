"""The record of a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import finish, plan
from marble_rl.compare.job_result import JobResult, finished
from marble_rl.compare.jobs import config_hash, identity
from marble_rl.errors import InputError
from marble_rl.runs.scores import ImageScores, Scores, WeightsScores


def image(prompt: str, index: int, **scores: float | None) -> ImageScores:
    return ImageScores(prompt, "things", index, 0, scores)


def test_a_result_is_made_of_scores_and_metrics(config: Path) -> None:
    (job,) = plan(config, methods="marble", seeds=(0,))
    job.run.mkdir(parents=True)
    lines = [
        {"step": 0, "time/rollout": 2.0, "time/scoring": 9.0, "time/reward/a": 9.0, "alpha_bar/a": 0.5, "qp/norm": 0.3},
        {"step": 1, "time/rollout": 1.0, "time/update": 0.5, "alpha_bar/a": 0.25, "reward/a": 7.0},
    ]
    lines[1]["qp/norm"] = float("nan")
    (job.run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    images = [image("x", 0, a=1.0, b=None), image("x", 0, a=2.0, b=None), image("y", 1, a=4.0, b=5.0)]
    images.append(image("y", 1, a=4.0, b=None))
    weights = {"ema": WeightsScores({"a": 2.75, "b": 5.0}, images)}
    scores = Scores(step=8, held_out_rewards=["b"], differences={}, weights=weights)
    finished(job, scores, 3.0).write(job.result)
    result = JobResult.read(job.result)
    assert result.per_prompt == {"a": [1.5, 4.0], "b": [None, 5.0]}
    assert (result.prompts, result.images_per_prompt, result.held_out) == (2, 2, ["b"])
    assert (result.train_seconds, result.seconds_per_step, result.evaluate_seconds) == (3.5, 1.75, 3.0)
    assert result.training == {"alpha_bar/a": 0.375, "qp/norm": 0.3}
    assert result.config_hash == config_hash(identity(job.config))
    assert (result.steps, result.images_per_step) == (8, 2 * 24)
    assert {"marble", "torch", "python"} <= result.versions.keys()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"method": 1}', '{"failed": null, "colour": 1}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=r"x.json is not the result of a job.*Delete it"):
        JobResult.read(tmp_path / "x.json")


def test_a_result_of_the_last_release_is_read(config: Path) -> None:
    """It had a `format` and no version."""
    result = finish(plan(config)[0])
    tree = json.loads(plan(config)[0].result.read_text())
    assert tree.pop("version") == 1
    plan(config)[0].result.write_text(json.dumps({**tree, "format": 1}))
    assert JobResult.read(plan(config)[0].result) == result


def test_a_result_of_a_later_version_is_read_as_far_as_it_is_known(config: Path) -> None:
    finish(plan(config)[0])
    tree = json.loads(plan(config)[0].result.read_text())
    plan(config)[0].result.write_text(json.dumps({**tree, "version": 2, "colour": "blue"}))
    assert JobResult.read(plan(config)[0].result).version == 2
