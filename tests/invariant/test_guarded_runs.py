"""Guards through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runs import base_config, lora_bytes, marble, metrics, train, write_config

BRIGHT: dict[str, Any] = {"name": "bright", "type": "brightness"}
SMALL: dict[str, Any] = {"name": "small", "type": "jpeg_compressibility"}
DARK: dict[str, Any] = {"name": "dark", "type": "rewards_for_tests:darkness"}
COLOUR: dict[str, Any] = {"name": "colour", "type": "colour"}
GUARDED = [BRIGHT, SMALL, {**DARK, "guard": {"floor": 0.001, "band": 0.01}}, {**COLOUR, "guard": {}}]


def config(path: Path, model: Path, rewards: list[dict[str, Any]], kind: str = "fair", **changes: Any) -> Path:
    return write_config(path, model, rewards=rewards, balance={"type": kind}, **changes)


@pytest.fixture(scope="module", params=["fair", pytest.param("fixed", marks=pytest.mark.full)])
def guarded(request: pytest.FixtureRequest, tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run: two updates in each of four rollouts, a checkpoint in the middle of one."""
    folder = tmp_path_factory.mktemp(request.param)
    train(config(folder / "config.yaml", tiny_sd3, GUARDED, request.param), folder / "run")
    return folder


def test_the_log_shows_levels_floors_and_pulls(guarded: Path) -> None:
    lines = metrics(guarded / "run")
    for line in lines:
        assert line["floor/dark/limit"] == 0.001
        assert line["floor/dark/rate"] == pytest.approx(
            min(max((0.001 - line["floor/dark/level"]) / 0.01, -1.0), 0.5), abs=1e-9
        )
        assert 0.0 <= line["floor/dark/lambda"] <= 2.0
        assert line["floor/dark/slack"] >= 0.0
        assert line["alpha_bar/dark"] == 0.0
    # Once a rollout, not once an update.
    levels = [line["floor/dark/level"] for line in lines]
    assert levels[0::2] == levels[1::2]
    assert len(set(levels)) == 4
    assert any(line["floor/dark/lambda"] > 0 for line in lines)
    raw = [json.loads(line) for line in (guarded / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "time/base_images" in raw[0]
    assert all("time/base_images" not in line for line in raw[1::2])


def test_a_resumed_run_is_the_uninterrupted_one(guarded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(guarded / "config.yaml", run, "--set", "trainer.steps=3")
    train(guarded / "config.yaml", run, "--resume")
    assert lora_bytes(run) == lora_bytes(guarded / "run")
    assert metrics(run) == metrics(guarded / "run")


@pytest.mark.parametrize("content", [None, *(pytest.param(c, marks=pytest.mark.full) for c in ("{", "more"))])
def test_lost_damaged_or_further_base_scores_change_nothing(guarded: Path, tmp_path: Path, content: str | None) -> None:
    """`more`: those of a run that had come further than its checkpoint when it was killed."""
    run = tmp_path / "run"
    train(guarded / "config.yaml", run, "--set", "trainer.steps=3")
    scores = run / "base_scores.json"
    if content is None:
        scores.unlink()
    else:
        scores.write_text((guarded / "run" / scores.name).read_text() if content == "more" else content)
    outcome = train(guarded / "config.yaml", run, "--resume")
    assert ("is not a record of base scores" in outcome.err) == (content == "{")
    assert lora_bytes(run) == lora_bytes(guarded / "run")
    assert metrics(run) == metrics(guarded / "run")


def test_the_run_can_be_diagnosed(guarded: Path, tmp_path: Path) -> None:
    outcome = marble("diagnose", guarded / "run", "--batches", 3, "--out", tmp_path)
    assert outcome.code == 0, outcome.err


def test_another_floor_is_accepted_on_resume_and_another_guard_is_not(guarded: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(guarded / "config.yaml", run, "--set", "trainer.steps=2")
    floor = ("--set", "rewards.2.guard.floor=-0.5")
    outcome = train(guarded / "config.yaml", run, "--resume", *floor, "--set", "trainer.steps=3")
    assert "rewards.2.guard.floor was 0.001, now -0.5" in outcome.err
    refused = marble(
        "train", guarded / "config.yaml", "--out", run, "--resume", *floor, "--set", "rewards.3.guard=null"
    )
    assert refused.code == 2
    assert "rewards.3.guard" in refused.err


@pytest.mark.parametrize("kind", ["fair", pytest.param("fixed", marks=pytest.mark.full)])
def test_far_above_its_floor_a_guard_changes_nothing(tiny_sd3: Path, tmp_path: Path, kind: str) -> None:
    """As if it were held out; `fixed` takes another path to the same gradient, so up to rounding."""
    free = [BRIGHT, SMALL, {**DARK, "guard": {"floor": -9.0}}]
    train(config(tmp_path / "a.yaml", tiny_sd3, free, kind), tmp_path / "a", "--set", "trainer.steps=2")
    held = [BRIGHT, SMALL, {**DARK, "held_out": True}]
    train(config(tmp_path / "b.yaml", tiny_sd3, held, kind), tmp_path / "b", "--set", "trainer.steps=2")
    for one, other in zip(metrics(tmp_path / "a"), metrics(tmp_path / "b"), strict=True):
        assert one["floor/dark/lambda"] == 0.0
        for key in ("update/norm", "reward/bright", "reward/small", "loss/policy"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fair", "fixed"])
def test_a_guard_is_held_against_an_objective_that_pushes_it_down(tiny_sd3: Path, tmp_path: Path, kind: str) -> None:
    settings = {
        "rollout": {"groups": 4, "group_size": 8, "steps": 3},
        "optimizer": {"lr": 0.03},
        "trainer": {"steps": 40, "save_every": 50, "micro_batch": 32},
    }
    held = {**DARK, "held_out": True, "watch": {"window": 2}}
    train(config(tmp_path / "a.yaml", tiny_sd3, [BRIGHT, held], kind, **settings), tmp_path / "free")
    guard = {**DARK, "guard": {"floor": 0.0}}
    train(config(tmp_path / "b.yaml", tiny_sd3, [BRIGHT, guard], kind, **settings), tmp_path / "guarded")
    free, guarded = metrics(tmp_path / "free"), metrics(tmp_path / "guarded")
    fall = free[0]["watch/dark"] - free[-1]["watch/dark"]
    assert fall > 0.005
    late = [line["floor/dark/level"] for line in guarded[20:]]
    assert sum(late) / len(late) > -0.25 * fall
    outcome = marble("report", tmp_path / "guarded")
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "guarded" / "report.html").read_text()
    for text in (
        "Floors of the guards",
        "Does every guard hold its floor?",
        "Pull of the guards",
        "Does every objective",
    ):
        assert text in page


@pytest.mark.full
def test_contradicting_guards_are_reported(tiny_sd3: Path, tmp_path: Path) -> None:
    """Bright and dark sum to 1: both cannot rise."""
    up = {"floor": 0.5, "band": 0.1}
    rewards = [SMALL, {**BRIGHT, "guard": up}, {**DARK, "guard": up}]
    path = config(tmp_path / "c.yaml", tiny_sd3, rewards, rollout={**base_config(tiny_sd3)["rollout"], "updates": 1})
    outcome = train(path, tmp_path / "run")
    assert "warning after step 5: no direction satisfies all floors, for 5 rollouts: bright stands at" in outcome.err
    assert marble("report", tmp_path / "run").code == 0
    assert "of 8 steps no direction satisfied all floors" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.full
def test_one_gradient_per_reward_is_counted_in_the_memory_estimate(tiny_sd3: Path, tmp_path: Path) -> None:
    guard = config(tmp_path / "a.yaml", tiny_sd3, [BRIGHT, {**DARK, "guard": {}}], "fixed")
    plain = config(tmp_path / "b.yaml", tiny_sd3, [BRIGHT, DARK], "fixed")
    assert "a row for each reward" in marble("config", "show", guard).out
    assert "a single row" in marble("config", "show", plain).out


@pytest.mark.parametrize(
    ("rewards", "balance", "says"),
    [
        ([{**BRIGHT, "guard": {}}], {"type": "fair"}, ["rewards: all trained ones are guards", "remove `guard`"]),
        (
            [SMALL, {**BRIGHT, "guard": {}, "held_out": True}],
            {"type": "fair"},
            ["rewards.1 (bright).guard: a guard is trained on, but held_out: true is given; remove"],
        ),
        (
            [SMALL, {**BRIGHT, "guard": {}, "priority": 2}],
            {"type": "fair"},
            ["rewards.1 (bright).guard: a guard has no priority, but priority: 2 is given; remove one of the two"],
        ),
        (
            [SMALL, {**BRIGHT, "guard": {}, "schedule": [[0, 2]]}],
            {"type": "fair"},
            ["rewards.1 (bright).guard: a guard holds in every step, but it has a schedule; remove"],
        ),
        (
            [SMALL, {**BRIGHT, "guard": {}}],
            {"type": "marble"},
            ["rewards.1 (bright).guard: balance.type: marble does not support guards; set balance.type: fair"],
        ),
        (
            [SMALL, {**BRIGHT, "guard": {}}],
            {"type": "fixed", "coefficients": {"small": 0.5, "bright": 0.5}},
            ["balance.coefficients: 'bright' is a guard, which has no coefficient; remove it"],
        ),
        (
            [SMALL, {**BRIGHT, "guard": {"flor": 1}}],
            {"type": "fair"},
            ["rewards.1.guard.flor", "Did you mean 'floor'?"],
        ),
        (
            [SMALL, {**BRIGHT, "guard": {"band": 0}}],
            {"type": "fair"},
            ["rewards.1.guard.band: expected a number greater than 0, got 0"],
        ),
        (
            [SMALL, {**BRIGHT, "guard": {"base_images": 1}}],
            {"type": "fair"},
            ["rewards.1.guard.base_images: expected a number greater than or equal to 2, got 1"],
        ),
        ([SMALL, {**BRIGHT, "guard": -0.05}], {"type": "fair"}, ["rewards.1.guard: expected a mapping"]),
        (
            [{**SMALL, "schedule": [[0, 2]]}, {**BRIGHT, "guard": {}}],
            {"type": "fair"},
            ["no reward's `schedule` covers step 2"],
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    tiny_sd3: Path, tmp_path: Path, rewards: list[dict[str, Any]], balance: dict[str, Any], says: list[str]
) -> None:
    path = write_config(tmp_path / "c.yaml", tiny_sd3, rewards=rewards, balance=balance)
    outcome = marble("train", path, "--out", tmp_path / "run")
    assert outcome.code == 2
    for text in says:
        assert text in outcome.err
    assert not (tmp_path / "run").exists()
