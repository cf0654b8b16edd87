"""`marble diagnose` through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from marble_rl.config.run import OptimizerConfig
from marble_rl.diagnose.analysis import direction_figures
from marble_rl.models import load_model
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.settings import OldPolicyConfig
from marble_rl.training.update import Updater
from runs import marble


@pytest.fixture
def run(finished_run: Path) -> Path:
    return finished_run


def test_a_run_is_diagnosed_and_left_as_it_was(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    outcomes = [
        marble("diagnose", run, "--batches", 6, "--out", tmp_path / name, "--json") for name in ("one", "other")
    ]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
    assert outcomes[0].out == outcomes[1].out, "seeded"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert len(list((tmp_path / "one").iterdir())) == 2, "the gradients are gone"
    products = torch.from_numpy(np.load(tmp_path / "one" / "products.npy"))
    assert products.shape == (6, 4, 6, 4)

    found = json.loads(outcomes[0].out)
    assert json.loads((tmp_path / "one" / "diagnosis.json").read_text()) == found
    assert found["names"] == ["small", "bright", "colour"]
    assert (found["step"], found["batches"], found["images"]) == (8, 6, 8)  # a rollout serves two updates
    directions = found["directions"]
    assert {"weighted_sum", "uniform", "marble", "between_refreshes", "alpha_over_norm"} <= set(directions)
    assert directions.keys() == found["applied"].keys() <= found["meanings"].keys()
    for figures in directions.values():
        for way in ("in_batch", "independent", "rest"):
            estimate = figures[way]["min_cos"]
            assert -1 <= estimate["low"] <= estimate["mean"] <= estimate["high"] <= 1
    assert set(found["larger"]) == {"2"}, "6 mini-batches make 3 of twice the size; fewer would tell nothing"
    assert set(found["larger"]["2"]) <= set(directions)
    assert found["larger"]["2"]["marble"] != directions["marble"]
    assert -1 <= found["advantages"]["agreement"]["mean"] <= 1
    assert sum(share["mean"] for share in found["advantages"]["alpha_of_advantages"]) == pytest.approx(1)
    assert {"min_variance"} <= set(directions) & set(found["larger"]["2"])
    alone = torch.tensor([1.0, 1, 1, 0], dtype=torch.float64).expand(6, 4)
    mine = direction_figures(products, alone, 3).independent["min_cos"]
    kept = directions["uniform"]["independent"]["min_cos"]
    assert (mine.mean, mine.low, mine.high) == pytest.approx((kept["mean"], kept["low"], kept["high"]))
    own = {name: figures["in_batch"]["min_cos"]["mean"] for name, figures in directions.items()}
    assert own["marble"] == pytest.approx(max(own.values())), (
        "no direction has a larger smallest cosine in its own batch"
    )
    assert {sample["source"] for sample in found["samples"]} == {"things", "colours"}
    colour = [sample["advantages"][2] for sample in found["samples"] if sample["source"] == "things"]
    assert set(colour) == {None}, "the reward does not apply to these"

    shown = marble("diagnose", run, "--batches", 3, "--all", "--out", tmp_path / "shown")
    assert shown.code == 0
    assert "between_refreshes" in shown.out


def test_levels_of_a_run(run: Path, tmp_path: Path) -> None:
    outcomes = [
        marble("diagnose", run, "--levels", "--batches", 4, "--out", tmp_path / name, "--json") for name in ("a", "b")
    ]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err
    assert outcomes[0].out == outcomes[1].out, "seeded"
    found = json.loads(outcomes[0].out)
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["levels.json"]
    assert (found["batches"], found["noise"], len(found["levels"])) == (4, "sample", len(found["lengths"]))
    assert found["levels"] == sorted(found["levels"], reverse=True)
    assert max(found["lengths"]) == 1
    assert all(len(signals) == 3 for signals in found["signals"])
    shown = marble("diagnose", run, "--levels", "--batches", 4, "--out", tmp_path / "a")
    assert shown.code == 0, shown.err
    assert "Gradients by noise level" in shown.out


def test_answers_come_first_then_one_table(run: Path, tmp_path: Path) -> None:
    outcome = marble("diagnose", run, "--batches", 4, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    questions = ("enough signal?", "oppose each other?", "serves the worst reward best?")
    places = [outcome.out.index(question) for question in (*questions, "weighted_sum         fixed")]
    assert places == sorted(places)
    assert "4 batches cannot tell; use" in outcome.out.replace("\n", " ").replace("  ", " ")
    assert "between_refreshes" not in outcome.out
    assert outcome.out.count("\n ─") == 1, "one table"
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert len(found["answers"]) == 3
    assert all(cosine is None or -1 <= cosine <= 1 for row in found["cosines"] for cosine in row)


def test_bad_input(run: Path, tmp_path: Path) -> None:
    for arguments, says in (
        ((tmp_path,), "is not a run folder"),
        ((run, "--step", "2"), "no checkpoint of step 2"),
        ((run, "--batches", "2"), "3"),
    ):
        outcome = marble("diagnose", *arguments)
        assert outcome.code == 2
        assert says in outcome.err


def test_a_folder_that_cannot_be_written_is_refused_at_once(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        outcome = marble("diagnose", run, "--batches", 3, "--out", out)
        assert outcome.code == 2
        assert f"--out: cannot write to {out}" in outcome.err
        assert "mini-batches" not in outcome.err, "nothing was measured"


def test_what_was_measured_survives_what_cannot_be_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ArithmeticError("for the test")

    monkeypatch.setattr("marble_rl.diagnose.measure.directions", fail)
    outcome = marble("diagnose", run, "--batches", 3, "--out", tmp_path)
    assert outcome.code == 70
    assert "ArithmeticError: for the test" in outcome.err
    assert np.load(tmp_path / "products.npy").shape == (3, 4, 3, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["products.npy"], "the gradients are gone"


def test_the_preview_is_what_adamw_does(tiny_sd3: Path) -> None:
    model = load_model(str(tiny_sd3), torch.device("cpu"))
    policy = LoraPolicy(model.transformer, LoraConfig(rank=2), model.lora_targets, seed=0)
    config = OptimizerConfig(lr=1e-2, weight_decay=0.0, ema_decay=0.9)
    updater = Updater(policy, config, OldPolicyConfig(), steps=10)
    dice = torch.Generator().manual_seed(0)
    for step in range(3):
        gradient = torch.randn(policy.flat.shape, generator=dice)
        before = policy.flat.clone()
        previewed = updater.preview(gradient)
        assert torch.equal(policy.flat, before)
        updater.apply(gradient, 0.0, step)
        assert torch.allclose(before - policy.flat, 1e-2 * previewed, atol=1e-7)
