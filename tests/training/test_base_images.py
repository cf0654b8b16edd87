"""Base scores of guards: the same whenever and by whomever they are computed, kept in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from marble_rl.distributed.world import World
from marble_rl.models.base import PromptCache
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rollout.rollout import sample
from marble_rl.runs.base_scores import BaseScore, BaseScores
from marble_rl.runs.inputs import check_inputs
from marble_rl.seeding import generator, normal_rows
from marble_rl.training.base_images import BaseImages
from steps import CPU, Parts, parts
from thread_ranks import in_threads

REWARDS = [
    {"name": "small", "type": "jpeg_compressibility"},
    {"name": "bright", "type": "brightness", "guard": {"base_images": 3}},
    {"name": "colour", "type": "colour", "guard": {}},
]


def make(model: Path, folder: Path) -> tuple[Parts, Scorer]:
    made = parts(model, folder, rewards=REWARDS, balance={"type": "fair"})
    scorer = check_inputs(made.config).scorer
    scorer.load(CPU)
    return made, scorer


def base_of(made: Parts, scorer: Scorer, folder: Path, said: list[str], world: World | None = None) -> BaseImages:
    cache, file = PromptCache(made.model), folder / "base_scores.json"
    return BaseImages(made.config, scorer, made.model, made.policy, cache, world or World(), file, said.append)


def built(model: Path, folder: Path) -> tuple[Parts, BaseImages, Scorer, list[str]]:
    said: list[str] = []
    made, scorer = make(model, folder)
    return made, base_of(made, scorer, folder, said), scorer, said


def test_readings_are_scores_against_the_model_without_adapter(tiny_sd3: Path, tmp_path: Path) -> None:
    made, base, scorer, _ = built(tiny_sd3, tmp_path)
    experience = made.gather()
    with torch.no_grad():
        made.policy.flat.add_(0.3)  # the trained adapter has no part in it
    drawn, table, config = experience.rollout.drawn, experience.unclipped, made.config.rollout
    readings = base.read(table, drawn, made.display)

    shape = made.model.latent_shape(None, None, None)
    cache = PromptCache(made.model)
    differences, squares = [], 0.0
    for group in drawn:
        noise = normal_rows((generator(0, "base", group.prompt.index, j) for j in range(3)), shape)
        with made.policy.acting_as("base"):
            conditioning = cache.encode([group.prompt.text]).repeat(3)
            sigmas = made.model.sigmas(config.steps, shape)
            images = sample(made.model, noise, conditioning, sigmas, config.solver)[1]
        scores = scorer.score(["bright"], images, [group.prompt] * 3, 3).values[:, 0]
        rows = slice(group.slot * 4, group.slot * 4 + 4)
        differences.append(table.columns(["bright"]).values[rows, 0] - scores.mean())
        squares += float(((scores - scores.mean()) ** 2).sum())
    reading = readings["bright"]
    assert reading.difference == pytest.approx(float(torch.cat(differences).mean()), rel=1e-6)
    assert reading.squares == pytest.approx(squares, rel=1e-6)
    assert reading.freedom == 2 * len(drawn)
    with_colour = [group for group in drawn if group.prompt.source == "colours"]
    assert readings["colour"].freedom == 2 * len(with_colour)
    assert "time/base_images" in made.display.take_times()


def test_scores_are_kept_and_made_again_where_they_are_missing(tiny_sd3: Path, tmp_path: Path) -> None:
    made, base, scorer, _ = built(tiny_sd3, tmp_path)
    first, second = made.gather(0), made.gather(1)
    expected = [base.read(e.unclipped, e.rollout.drawn, made.display) for e in (first, second)]
    content = json.loads((tmp_path / "base_scores.json").read_text())
    assert set(next(iter(content["prompts"].values()))) <= {"bright", "colour"}
    calls = scorer.counts()["bright"].calls
    assert base.read(first.unclipped, first.rollout.drawn, made.display) == expected[0]
    assert scorer.counts()["bright"].calls == calls

    _, again, counted, said = built(tiny_sd3, tmp_path)
    for e, values in zip((first, second), expected, strict=True):
        assert again.read(e.unclipped, e.rollout.drawn, made.display) == values
    assert counted.counts()["bright"].calls == 0
    assert said == []

    for damage in ("{", '{"version": 1}', json.dumps({**content, "made_with": {"seed": 5}})):
        (tmp_path / "base_scores.json").write_text(damage)
        _, rebuilt, _, said = built(tiny_sd3, tmp_path)
        # In another order: a score does not depend on what was computed before it.
        assert rebuilt.read(second.unclipped, second.rollout.drawn, made.display) == expected[1]
        assert rebuilt.read(first.unclipped, first.rollout.drawn, made.display) == expected[0]
        assert bool(said) == ("made_with" not in damage)
        assert json.loads((tmp_path / "base_scores.json").read_text()) == content


@pytest.mark.parametrize("lockstep", [False, True])
def test_ranks_divide_the_work(tiny_sd3: Path, tmp_path: Path, lockstep: bool) -> None:
    """Three ranks for four prompts. In lockstep all of them make as many passes."""
    made, base, _, _ = built(tiny_sd3, tmp_path / "alone")
    experience = made.gather()
    expected = base.read(experience.unclipped, experience.rollout.drawn, made.display)

    ranks = [make(tiny_sd3, tmp_path / f"rank-{rank}") for rank in range(3)]  # loading is not thread-safe

    def work(world: World) -> tuple[Any, int]:
        world.lockstep = lockstep
        own, scorer = ranks[world.rank]
        images = base_of(own, scorer, tmp_path / f"rank-{world.rank}", [], world)
        passes, velocity = 0, own.model.velocity

        def counted(*arguments: Any) -> Any:
            nonlocal passes
            passes += 1
            return velocity(*arguments)

        own.model.velocity = counted  # type: ignore[method-assign]
        return images.read(experience.unclipped, experience.rollout.drawn, own.display), passes

    results = in_threads(3, work)
    assert [readings for readings, _ in results] == [expected] * 3
    passes = [count for _, count in results]
    assert (len(set(passes)) == 1) == lockstep
    assert not (tmp_path / "rank-1" / "base_scores.json").exists()
    files = [tmp_path / name / "base_scores.json" for name in ("rank-0", "alone")]
    ours, theirs = (list(json.loads(file.read_text())["prompts"].items()) for file in files)
    assert ours == theirs, "not even the order differs"


def test_the_record(tmp_path: Path) -> None:
    score = BaseScore.of([1.0, 2.0, 6.0])
    assert score == BaseScore(3, 3.0, 14.0)
    record = BaseScores(made_with={"seed": 0}, prompts={7: {"bright": score}})
    record.write(tmp_path / "base_scores.json")
    assert BaseScores.read(tmp_path / "base_scores.json") == record
