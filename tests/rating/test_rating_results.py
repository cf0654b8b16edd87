"""`marble rate results` against a computation by hand, and what it says where something is not known."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from ratings import NAMES
from runs import marble

PROMPTS = 4


def write_answers(study: Path, ratings: dict[tuple[str, int, str, str], float], against: str | None = None) -> None:
    """(rater, prompt, criterion, model) -> value"""
    lines = [
        json.dumps(
            {"rater": r, "prompt": p, "image": 0, "criterion": c, "model": m, "against": against, "value": v, "time": 0}
        )
        for (r, p, c, m), v in ratings.items()
    ]
    (study / "answers.jsonl").write_text("".join(f"{line}\n" for line in lines))


def results(study: Path) -> dict[str, Any]:
    done = marble("rate", "results", study, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def random_ratings(raters: tuple[str, ...], seed: int = 0) -> dict[tuple[str, int, str, str], float]:
    dice = np.random.default_rng(seed)
    places = itertools.product(raters, range(PROMPTS), ("alignment", "quality"), NAMES)
    return {place: float(dice.integers(1, 6)) for place in places}


def test_figures_equal_a_computation_by_hand(study: Path) -> None:
    given = random_ratings(("anna", "ben", "carl"))
    write_answers(study, given)
    found = results(study)
    assert found["raters"] == dict.fromkeys(("anna", "ben", "carl"), 24)
    assert found["asked"] == 24
    for of in found["criteria"]:
        y = {m: np.array([v for (_, _, c, n), v in given.items() if (c, n) == (of["criterion"], m)]) for m in NAMES}
        for model in of["models"]:
            own, others = y[model["name"]], [y[name] for name in NAMES if name != model["name"]]
            score = np.mean([(np.sign(own - other) + 1) / 2 for other in others])
            assert model["mean"]["value"] == pytest.approx(own.mean())
            assert model["win_rate"]["value"] == pytest.approx(score)
            assert model["mean"]["low"] < own.mean() < model["mean"]["high"]
        assert [(pair["model"], pair["against"]) for pair in of["pairs"]] == [
            ("base", "tuned"),
            ("inverted", "tuned"),
            ("inverted", "base"),
        ]
        for pair in of["pairs"]:
            difference = y[pair["model"]] - y[pair["against"]]
            assert pair["comparisons"] == 12
            assert pair["difference"]["value"] == pytest.approx(difference.mean())
            assert pair["win_rate"]["value"] == pytest.approx(((np.sign(difference) + 1) / 2).mean())
            # SE^2 of the two-way analysis of variance, from its mean squares
            cells = difference.reshape(3, PROMPTS)
            rest = cells - cells.mean(1)[:, None] - cells.mean(0) + cells.mean()
            squares = (
                PROMPTS * cells.mean(1).var(ddof=1),
                3 * cells.mean(0).var(ddof=1),
                (rest**2).sum() / 6,
            )
            total = max(squares[0], squares[1], squares[0] + squares[1] - squares[2])
            freedom = total**2 / (squares[0] ** 2 / 2 + squares[1] ** 2 / 3 + squares[2] ** 2 / 6)
            reach = t.ppf(0.975, max(freedom, 2)) * math.sqrt(total / 12)
            assert pair["difference"]["high"] == pytest.approx(min(4, difference.mean() + reach))
            assert pair["difference"]["low"] == pytest.approx(max(-4, difference.mean() - reach))
        strengths = [model["strength"]["value"] for model in of["models"]]
        assert sum(strengths) == pytest.approx(0, abs=1e-9)


def test_a_small_example_in_full(study: Path) -> None:
    """Two raters who agree on everything but one."""
    table = {"tuned": [4, 5, 4, 5], "base": [2, 3, 4, 1], "inverted": [1, 1, 1, 1]}
    given = {
        (rater, p, criterion, name): float(values[p])
        for rater in ("anna", "ben")
        for criterion in ("alignment", "quality")
        for name, values in table.items()
        for p in range(PROMPTS)
    }
    given["ben", 0, "quality", "tuned"] = 2.0
    write_answers(study, given)
    alignment, quality = results(study)["criteria"]
    assert alignment["agreement"] == pytest.approx(1)
    assert quality["agreement"] < 1
    tuned, base, inverted = alignment["models"]
    assert [model["mean"]["value"] for model in (tuned, base, inverted)] == [4.5, 2.5, 1.0]
    # Against base 3 wins and a tie, against inverted 4 wins: 7.5 of 8.
    assert tuned["win_rate"]["value"] == 7.5 / 8
    assert base["win_rate"]["value"] == (0.5 + 3.5) / 8
    assert inverted["mean"] == {"value": 1.0, "low": None, "high": None}, "all the same: no interval"
    assert tuned["strength"]["value"] > base["strength"]["value"] > inverted["strength"]["value"]
    assert base["strength"]["value"] == pytest.approx(0, abs=1e-9)


def test_a_model_that_always_wins_has_no_strength_and_that_is_said(study: Path) -> None:
    scores = {"tuned": 5.0, "base": 3.0, "inverted": 3.0}
    given = {place: scores[place[3]] for place in random_ratings(("anna", "ben"))}
    write_answers(study, given)
    (alignment, _) = results(study)["criteria"]
    assert [model["strength"]["value"] for model in alignment["models"]] == [None] * 3
    assert alignment["notes"] == ["tuned won every comparison with the others, so there are no finite strengths"]
    assert [model["win_rate"]["value"] for model in alignment["models"]] == [1.0, 0.25, 0.25]
    shown = marble("rate", "results", study).out
    assert "tuned won every comparison with the others, so there are no finite strengths" in shown
    assert "inf" not in shown.replace("inverted", "").replace("finite", "")
    assert "nan" not in shown


def test_one_rater_has_no_agreement_and_an_interval_over_prompts(study: Path) -> None:
    given = random_ratings(("anna",))
    write_answers(study, given)
    done = marble("rate", "results", study)
    assert done.out.count("(Krippendorff's alpha, ordinal): ?") == 2
    assert "95 % intervals over prompts only, because there is one rater" in done.out
    assert "anna 24 of 24" in done.out


def test_pairs(study: Path) -> None:
    plan = json.loads((study / "study.json").read_text())
    plan |= {"ask": "pairs", "models": plan["models"][:2]}
    (study / "study.json").write_text(json.dumps(plan))
    scores = {"anna": [1.0, 1.0, 0.5, 1.0], "ben": [1.0, 0.0, 0.5, 1.0]}
    given = {
        (r, p, c, "tuned"): v for r, of in scores.items() for p, v in enumerate(of) for c in ("alignment", "quality")
    }
    write_answers(study, given, against="base")
    alignment = results(study)["criteria"][0]
    assert alignment["models"][0]["win_rate"]["value"] == 6 / 8
    assert alignment["models"][0]["mean"]["value"] is None
    assert alignment["models"][0]["strength"]["value"] == pytest.approx(math.log(3) / 2)
    assert alignment["pairs"][0]["win_rate"]["value"] == 2 / 8
    # Units (1,1), (1,0), (.5,.5), (1,1): o_1,1 = 4, o_.5,.5 = 2, o_1,0 = o_0,1 = 1; n = 5, 2, 1 of 8.
    # alpha = 1 - 7 * 2 / (64 - 25 - 4 - 1)
    assert alignment["agreement"] == pytest.approx(1 - 14 / 34)
    shown = marble("rate", "results", study).out
    assert "nominal" in shown
    assert "difference" not in shown


def test_unfinished_raters_count_with_what_they_answered(study: Path) -> None:
    given = random_ratings(("anna", "ben"))
    kept = {place: value for place, value in given.items() if place[0] == "anna" or place[1:3] == (1, "quality")}
    del kept["ben", 1, "quality", "base"]
    write_answers(study, kept)
    found = results(study)
    assert found["raters"] == {"anna": 24, "ben": 2}
    alignment, quality = found["criteria"]
    assert alignment["agreement"] is None
    assert [pair["comparisons"] for pair in quality["pairs"]] == [4, 5, 4]
    tuned = [value for (_, _, c, m), value in kept.items() if (c, m) == ("quality", "tuned")]
    assert quality["models"][0]["mean"]["value"] == pytest.approx(np.mean(tuned))


def test_nobody_has_answered(study: Path) -> None:
    assert marble("rate", "results", study).out.startswith("nobody has answered yet; start with: marble rate serve")
    assert results(study)["raters"] == {}


def test_csv_files_have_every_figure_and_every_answer(study: Path) -> None:
    given = random_ratings(("anna", "ben"))
    write_answers(study, given)
    found = results(study)
    with open(study / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (3 * 3 + 3 * 2 + 1)
    (row,) = [r for r in rows if (r["criterion"], r["figure"], r["model"]) == ("quality", "mean", "base")]
    figure = found["criteria"][1]["models"][1]["mean"]
    assert [float(row[key]) for key in ("value", "low", "high")] == [figure[key] for key in ("value", "low", "high")]
    with open(study / "answers.csv", newline="") as file:
        answers = list(csv.DictReader(file))
    assert {(a["rater"], int(a["prompt"]), a["criterion"], a["model"]): float(a["value"]) for a in answers} == given
    assert answers[0]["text"] == "a cup, number 1"


def test_answers_to_another_study_are_refused(study: Path) -> None:
    write_answers(study, {("anna", 0, "quality", "stranger"): 3.0})
    done = marble("rate", "results", study)
    assert done.code == 2
    assert "an answer to something that study.json does not ask" in done.err
