"""The record of an evaluation, and what is printed of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from marble_rl.errors import InputError
from marble_rl.evaluation.evaluate import Evaluation
from marble_rl.evaluation.report import print_scores, score_record
from marble_rl.inference.model_card import scores_table
from marble_rl.runs.scores import KeptPicture, Scores
from marble_rl.types import Prompt, RewardTable


def evaluation(**scores: list[float | None]) -> Evaluation:
    """One image of each prompt."""
    columns = [[0.0 if score is None else score for score in column] for column in scores.values()]
    applicable = [[score is not None for score in column] for column in scores.values()]
    table = RewardTable(tuple(scores), torch.tensor(columns, dtype=torch.float64).T, torch.tensor(applicable).T)
    return Evaluation([Prompt(i, f"prompt {i}", "s") for i in range(len(table.values))], 1, table)


def compared(base: Evaluation, ema: Evaluation, capsys: pytest.CaptureFixture[str]) -> tuple[Scores, str, str]:
    """The record, the printed table and that of the model card."""
    scores = score_record({"base": base, "ema": ema}, 8, [])
    print_scores(scores, Path("out"))
    return scores, capsys.readouterr().out, scores_table(scores, "ema")


def test_one_prompt_gives_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where others have a score of another reward only: no interval, no verdict."""
    base = evaluation(all=[0.1, 0.2, 0.3], one=[None, 0.25, None])
    scores, table, card = compared(base, evaluation(all=[0.3, 0.4, 0.5], one=[None, 0.75, None]), capsys)
    assert list(scores.differences) == ["all"]
    cells = {row.split()[0]: row.split() for row in table.splitlines() if row.split()[:1] in (["all"], ["one"])}
    assert cells["one"] == ["one", "0.2500", "0.7500", "+0.5000"]
    assert cells["all"][-1] == "up"
    assert "no interval: fewer than 2 prompts" in table
    assert "| one | 0.2500 | 0.7500 | +0.5000 |  |" in card
    assert "| all | 0.2000 | 0.4000 | +0.2000 | +0.2000 to +0.2000 |" in card


@pytest.mark.parametrize("silent", ["base", "ema"])
def test_a_reward_may_be_silent_on_one_of_the_weights(silent: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = evaluation(all=[0.1, 0.2], odd=[0.5, 0.5])
    unknown = evaluation(all=[0.1, 0.2], odd=[None, None])
    base, ema = (unknown, known) if silent == "base" else (known, unknown)
    scores, table, card = compared(base, ema, capsys)
    assert list(scores.differences) == ["all"]
    assert [row.split() for row in table.splitlines() if row.split()[:1] == ["odd"]] == [["odd", "0.5000"]]
    assert ("| odd |  | 0.5000 |  |  |" if silent == "base" else "| odd | 0.5000 |  |  |  |") in card


def test_weights_without_a_common_prompt_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    base, ema = (evaluation(odd=scores) for scores in ([0.1, 0.2, None, None], [None, None, 0.3, 0.4]))
    assert compared(base, ema, capsys)[0].differences == {}


@pytest.fixture
def scores() -> Scores:
    base, ema = evaluation(all=[0.1, 0.2], odd=[None, 0.5]), evaluation(all=[0.3, 0.4], odd=[None, 0.6])
    return score_record({"base": base, "ema": ema}, 8, ["odd"], [KeptPicture(1, {"ema": "images/1-ema.webp"})])


def test_the_record_is_read_as_it_was_written(scores: Scores, tmp_path: Path) -> None:
    scores.write(tmp_path / "scores.json")
    assert Scores.read(tmp_path / "scores.json") == scores
    assert (scores.before, scores.after, scores.prompts, scores.rewards) == ("base", "ema", 2, ["all", "odd"])


def test_an_evaluation_of_the_last_release_is_read(scores: Scores, tmp_path: Path) -> None:
    tree = scores.to_json()
    del tree["version"], tree["pictures"]
    (tmp_path / "scores.json").write_text(json.dumps(tree))
    assert Scores.read(tmp_path / "scores.json") == scores.model_copy(update={"pictures": []})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tree: tree.pop("weights"), "weights: Field required"),
        (lambda tree: tree["weights"]["ema"]["images"].pop(), "expected the same number of images"),
        (
            lambda tree: tree["weights"]["ema"]["means"].update(all="much"),
            "weights.ema.means.all: Input should be a valid",
        ),
        (lambda tree: tree["weights"]["ema"]["means"].update(all=10**400), "weights.ema.means.all: Input should be"),
        (lambda tree: tree["pictures"][0].update(row=2), "a picture is of no image in the list"),
        (lambda tree: tree["pictures"][0]["files"].update(old="x.webp"), "a picture is of no image in the list"),
    ],
)
def test_what_is_wrong_with_scores_is_named(
    scores: Scores, tmp_path: Path, damage: Callable[[dict[str, Any]], object], reason: str
) -> None:
    tree = scores.to_json()
    damage(tree)
    (tmp_path / "scores.json").write_text(json.dumps(tree))
    with pytest.raises(InputError) as caught:
        Scores.read(tmp_path / "scores.json")
    assert f"is not an evaluation that this version reads ({reason}" in str(caught.value)
    assert str(caught.value).endswith("Run marble evaluate again, or delete the file")


def test_a_change_that_prints_as_zero_has_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    base = evaluation(same=[0.1, 0.2, 0.3], up=[0.1, 0.2, 0.3])
    _, table, _ = compared(base, evaluation(same=[0.1 + 1e-9, 0.2 + 2e-9, 0.3 + 1e-9], up=[0.2, 0.3, 0.4]), capsys)
    rows = {row.split()[0]: row.split() for row in table.splitlines() if row.split()[:1] in (["same"], ["up"])}
    assert rows["same"][3:] == ["+0.0000", "+0.0000", "..", "+0.0000"]
    assert rows["up"][-1] == "up"
