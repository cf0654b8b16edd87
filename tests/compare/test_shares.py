"""Shares of what a training on one reward alone gains: by hand, with noise in both gains, and where there are none."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jobs import result, table
from marble_rl.compare.figures import Figures
from marble_rl.compare.job_result import JobResult
from marble_rl.compare.shares import MEAN, WORST, Shares
from marble_rl.compare.statistics import Array, over_seeds
from marble_rl.compare.table import Comparison, Row, compare_results
from marble_rl.compare.writing import markdown, notes, print_table, tidy_csv, write_table
from marble_rl.report.comparison import comparison_page

Scores = list[dict[str, float]]


def seeds(a: list[float], b: list[float]) -> Scores:
    return [{"a": x, "b": y} for x, y in zip(a, b, strict=True)]


BASE = seeds([0.2, 0.1, 0.3], [1.0, 1.0, 1.0])
SPECIALISTS = {  # of a they gain 1.0 on average, of b 2.0
    "only-a": seeds([1.1, 1.1, 1.4], [0.0, 0.0, 0.0]),
    "only-b": seeds([0.0, 0.0, 0.0], [2.9, 3.0, 3.1]),
}
JOINT = {  # shares of a .5 .6 .7, of b .5 .4 .6; and of the sum .2 .3 .1, .9 .9 .9
    "marble": seeds([0.7, 0.7, 1.0], [2.0, 1.8, 2.2]),
    "weighted_sum": seeds([0.4, 0.4, 0.4], [2.8, 2.8, 2.8]),
}


def row(comparison: Comparison, method: str) -> Row:
    return next(row for row in comparison.rows if row.method == method)


def test_shares_by_hand() -> None:
    found = table({"base": BASE, **SPECIALISTS, **JOINT})
    marble = row(found, "marble")
    assert marble.shares["a"].mean == pytest.approx(0.6)
    assert marble.shares["b"].mean == pytest.approx(0.5)
    assert marble.figures[WORST].mean == pytest.approx(0.5), "of each seed the smaller one: .5 .4 .6"
    assert marble.figures[MEAN].mean == pytest.approx((0.5 + 0.5 + 0.65) / 3)
    assert (marble.figures[WORST].n, marble.figures[WORST].over) == (3, "seeds")
    worst = marble.differences[WORST]
    assert worst.mean == pytest.approx((0.3 + 0.1 + 0.5) / 3), "paired by seed"
    assert worst.half_width == pytest.approx(4.302653 * 0.2 / 3**0.5), "Student's t, denominators at their means"
    assert marble.differences[MEAN].mean == pytest.approx((0.5 + 0.5 + 0.65 - 0.55 - 0.6 - 0.5) / 3)
    assert found.columns == [WORST, MEAN, "a", "b", "composite"]
    assert all(WORST not in row(found, name).figures for name in ("base", "only-a", "only-b"))
    assert not row(found, "base").shares


def test_with_denominators_that_are_certain_the_interval_is_students() -> None:
    alone = {"only-a": seeds([1.0] * 3, [0.0] * 3), "only-b": seeds([0.0] * 3, [1.0] * 3)}
    zero = {"base": seeds([0.0] * 3, [0.0] * 3)}
    found = table({**zero, **alone, "marble": seeds([0.5, 0.4, 0.6], [0.9, 0.8, 0.7])})
    worst = row(found, "marble").figures[WORST]
    reach = 4.302653 * 0.1 / 3**0.5
    assert (worst.low, worst.high) == pytest.approx((0.5 - reach, 0.5 + reach), rel=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("true_shares", [(0.3, 0.8, 0.9), (0.5, 0.5, 0.5)])
def test_the_interval_holds_the_true_worst_share_in_95_of_100_studies(true_shares: tuple[float, ...]) -> None:
    """Specialists are noisier than the method, with fewer seeds. Student's t over the seeds alone, which takes the
    denominators as certain, holds the truth less often."""
    dice, names, potential = np.random.default_rng(0), ["a", "b", "c"], np.array([1.0, 2.0, 0.5])
    truth = np.mean(np.min(dice.normal(true_shares, 0.1, (200_000, 3)), axis=1))

    def jobs(method: str, gains: Array, noise: float, n: int) -> list[JobResult]:
        draws = dice.normal(gains, noise * potential, (n, 3)).tolist()
        return [result(method, s, {k: [x] for k, x in zip(names, of, strict=True)}) for s, of in enumerate(draws)]

    inside, inside_students = [], []
    for _ in range(150):
        by_method = {f"only-{name}": jobs(f"only-{name}", potential, 0.2, 4) for name in names}
        by_method["base"] = [result("base", seed, {name: [0.0] for name in names}) for seed in range(6)]
        by_method["marble"] = jobs("marble", potential * true_shares, 0.1, 6)
        shares = Shares(Figures(by_method, names), by_method, names)
        worst = shares.of(by_method["marble"])[WORST]
        inside.append(worst.low <= truth <= worst.high)
        students = over_seeds(np.array([of[WORST] for of in shares.by_seed(by_method["marble"]).values()]))
        inside_students.append(students.low <= truth <= students.high)
    assert np.mean(inside) > 0.93
    assert np.mean(inside_students) < np.mean(inside)


def test_a_specialist_that_gains_nothing_gives_no_share() -> None:
    flat = {"only-b": seeds([0.0, 0.0, 0.0], [1.4, 0.9, 1.0])}
    found = table({"base": BASE, **SPECIALISTS, **flat, **JOINT})
    assert list(found.no_share) == ["b"]
    assert "only-b does not clearly gain (+0.1, 95 % interval" in found.no_share["b"]
    marble = row(found, "marble")
    assert marble.shares.keys() == {"a"}
    assert marble.figures[WORST].mean == pytest.approx(0.6), "of a alone"
    assert any("no share of b, which is left out of worst share and mean share" in line for line in notes(found))
    falling = table({"base": BASE, **SPECIALISTS, "only-b": seeds([0.0] * 3, [0.5] * 3), **JOINT})
    assert list(falling.no_share) == ["b"], "a specialist that clearly falls is no measure either"


def test_a_guard_has_no_share_and_needs_no_specialist() -> None:
    config = {"rewards": [{"name": "a", "guard": {"floor": 0.0}}, {"name": "b", "guard": None}]}
    results = [
        result(method, seed, {name: [value] for name, value in scores.items()}, config=config)
        for method, rows in {"base": BASE, "only-b": SPECIALISTS["only-b"], **JOINT}.items()
        for seed, scores in enumerate(rows)
    ]
    found = compare_results(results)
    marble = row(found, "marble")
    assert marble.shares.keys() == {"b"}
    assert marble.figures[WORST].mean == marble.shares["b"].mean
    assert found.jobs_for_shares == []


def test_specialists_with_fewer_seeds() -> None:
    fewer = {name: scores[:2] for name, scores in SPECIALISTS.items()}
    found = table({"base": BASE, **fewer, **JOINT})
    alone = ((1.1 - 0.2) + (1.1 - 0.1)) / 2
    assert row(found, "marble").shares["a"].mean == pytest.approx((0.5 + 0.6 + 0.7) / 3 / alone)
    assert row(found, "marble").figures[WORST].n == 3
    single = table({"base": BASE, **SPECIALISTS, "only-a": SPECIALISTS["only-a"][:1], **JOINT})
    assert single.no_share == {"a": "only-a and base have 1 seed in common, expected two"}
    assert row(single, "marble").shares.keys() == {"b"}


def test_no_reward_with_a_share() -> None:
    one = {name: scores[:1] for name, scores in {"base": BASE, **SPECIALISTS, **JOINT}.items()}
    found = table(one)
    assert not found.has_shares
    assert list(found.no_share) == ["a", "b"]
    assert WORST not in found.columns


def test_seeds_that_the_base_model_does_not_have_do_not_count() -> None:
    found = table({"base": BASE[:2], **SPECIALISTS, **JOINT})
    assert row(found, "marble").figures[WORST].n == 2
    assert any("fewer than n of weighted_sum, marble" in line for line in notes(found))


def test_one_training_of_a_method_has_an_interval_over_its_prompts() -> None:
    dice = np.random.default_rng(0)
    jobs = []
    for method, a, b in (("base", 0.0, 0.0), ("only-a", 1.0, 0.0), ("only-b", 0.0, 1.0), ("marble", 0.5, 0.9)):
        for seed in range(1 if method == "marble" else 3):
            scores = {"a": dice.normal(a, 0.2, 50).tolist(), "b": dice.normal(b, 0.2, 50).tolist()}
            jobs.append(result(method, seed, scores))
    worst = row(compare_results(jobs), "marble").figures[WORST]
    assert (worst.n, worst.over, worst.significant) == (1, "prompts", False)
    assert worst.low < worst.mean < worst.high
    assert worst.mean == pytest.approx(0.5, abs=0.1)
    assert worst.half_width < 0.4


def test_what_is_missing_for_shares_is_said_with_its_jobs() -> None:
    found = table(JOINT)
    hint = next(line for line in notes(found) if "more jobs" in line)
    assert "they need base, only-a, only-b." in hint
    assert "--methods ...,specialists,base adds them: 9 more jobs" in hint
    assert len(table({**JOINT, "base": BASE[:2]}).jobs_for_shares) == 7
    assert not table({"base": BASE, **SPECIALISTS}).jobs_for_shares, "there is no joint method"
    assert not table({"marble": [{"a": 1.0}] * 2}).jobs_for_shares, "there is one reward"
    assert not table({"base": BASE, **SPECIALISTS, **JOINT}).jobs_for_shares


def test_shares_are_shown_everywhere(tmp_path: Path) -> None:
    found = table({"base": BASE, **SPECIALISTS, **JOINT})
    write_table(found, tmp_path)
    assert Comparison.read(tmp_path / "compare.json") == found
    text = (tmp_path / "table.md").read_text()
    assert "| method | n | worst share | mean share | a | b | composite |" in text
    assert "## How much of a specialist's gain" in text
    assert any(line.startswith("| base | 3 |  |  |") for line in text.splitlines()), "no share of the base model"
    assert "marble,worst share,0,0.5" in tidy_csv(found)
    to_base = markdown(table({"base": BASE, **SPECIALISTS, **JOINT}, against="base")).split("Difference to base")[1]
    assert "| method | n | a | b | composite |" in to_base, "no share of the base model, so no difference to it"
    file = io.StringIO()
    print_table(found, Console(file=file, force_terminal=True, width=200, color_system=None))
    assert "worst" in file.getvalue()
    page = comparison_page(tmp_path)
    assert "No clear difference in the worst share; worse on b" in page
    assert "worst share" in page


# Two methods, and files of older versions.


def test_two_methods_have_no_composite_and_no_verdict_from_it(tmp_path: Path) -> None:
    """Two seeds, no reward that differs beyond its interval: every z-score would be +1 or -1 all the same."""
    scores = {"weighted_sum": seeds([0.1, 0.4], [0.5, 0.5]), "marble": seeds([0.2, 0.41], [0.5, 0.5])}
    found = table(scores)
    assert found.columns == ["a", "b"]
    assert all(r.z == {} and "composite" not in (*r.figures, *r.differences) for r in found.rows)
    assert "| ▲" not in markdown(found)
    assert any(line.startswith("no composite: it needs three methods") for line in notes(found))
    write_table(found, tmp_path)
    page = comparison_page(tmp_path)
    assert "No reward differs beyond its interval." in page
    assert 'class="verdict unknown"' in page
    assert "composite" not in page


def test_the_composite_alone_marks_nothing() -> None:
    """Three rewards that each differ a little, always the same way round: only the composite's interval is clear."""
    rows = {
        "base": [dict.fromkeys("abc", 0.0)] * 3,
        "weighted_sum": [{"a": 1.0, "b": 1.0, "c": 1.0}] * 3,
        "marble": [{"a": 1.3, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.3, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.3}],
    }
    found = table(rows)
    marble = row(found, "marble")
    assert marble.differences["composite"].low > 0
    assert not any(marble.differences[name].significant for name in "abc")
    assert not marble.decided("composite")
    shown = next(line for line in markdown(found).split("Difference to")[1].splitlines() if line.startswith("| marble"))
    assert "▲" not in shown
    line = next(line for line in tidy_csv(found).splitlines() if line.startswith("marble,composite"))
    assert line.endswith(",0")


def test_a_table_of_an_older_version_still_opens(tmp_path: Path) -> None:
    """Version 1: a composite of two methods, and no shares."""
    found = table({"weighted_sum": JOINT["weighted_sum"], "marble": JOINT["marble"]})
    tree = found.to_json() | {"version": 1}
    del tree["no_share"]
    for i, entry in enumerate(tree["rows"]):
        del entry["shares"]
        far = {"mean": 2.0 * i - 1, "low": 2.0 * i - 1.1, "high": 2.0 * i - 0.9, "n": 3, "over": "seeds"}
        entry["figures"]["composite"] = far
        entry["z"] = {"a": 1.0, "b": 1.0}
        if entry["differences"]:
            none = {"mean": 0.0, "low": -0.1, "high": 0.1}
            entry["differences"] = {"a": none, "b": none, "composite": far}
    (tmp_path / "compare.json").write_text(json.dumps(tree))
    assert Comparison.read(tmp_path / "compare.json").columns == ["a", "b"]
    assert 'class="verdict unknown"' in comparison_page(tmp_path)
