"""Time to score: by hand, where a training does not get there, and through the command."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from jobs import plan, result
from marble_rl.compare.job_result import CurvePoint, read_results
from marble_rl.compare.table import Comparison, Row, compare_results
from marble_rl.compare.writing import markdown, print_table, write_table
from marble_rl.report.comparison import comparison_page
from marble_rl.runs.layout import wall_seconds
from marble_rl.runs.metrics_lines import read_lines
from runs import base_config, marble, write_config

Curve = list[tuple[int, float, float]]
"""(step, seconds, share of both rewards)"""


def compared(curves: dict[str, list[Curve]], **options: str) -> Comparison:
    """The base model has 0, the specialists gain 1 and 2: a share of x is (x, 2x)."""
    means = {"base": (0.0, 0.0), "only-a": (1.0, 0.0), "only-b": (0.0, 2.0)}
    results = [result(m, seed, {"a": [a], "b": [b]}) for m, (a, b) in means.items() for seed in (0, 1, 2)]
    for method, by_seed in curves.items():
        for seed, curve in enumerate(by_seed):
            points = [CurvePoint(step, seconds, {"a": x, "b": 2 * x}) for step, seconds, x in curve]
            last = points[-1].means if points else {"a": 0.5, "b": 1.0}
            results.append(result(method, seed, {name: [x] for name, x in last.items()}, curve=points))
    return compare_results(results, **options)


def row(comparison: Comparison, method: str) -> Row:
    return next(row for row in comparison.rows if row.method == method)


SLOW: Curve = [(10, 100.0, 0.25), (20, 200.0, 0.5), (30, 300.0, 0.75), (40, 400.0, 1.0)]
FAST: Curve = [(step, seconds / 4, share) for step, seconds, share in SLOW]


def test_by_hand() -> None:
    found = compared({"weighted_sum": [SLOW] * 2, "fair": [FAST, [(s, t / 2, x) for s, t, x in SLOW]]})
    half, most = row(found, "fair").to_score
    assert (half.fraction, half.seeds, half.reached) == (0.5, 2, 2)
    assert half.seconds == pytest.approx((50 + 100) / 2)
    assert (half.steps, half.worst) == (pytest.approx(20), pytest.approx(0.5))
    assert most.seconds == pytest.approx((80 + 160) / 2), "on the line between two evaluations"
    assert most.faster is not None
    assert most.faster.mean == pytest.approx(math.sqrt(4 * 2))
    reach = 12.7062 * math.log(2) / 2  # Student's t of two values: their difference / 2 is the standard error
    assert (most.faster.low, most.faster.high) == pytest.approx(
        (math.sqrt(8) * math.exp(-reach), math.sqrt(8) * math.exp(reach)), rel=1e-4
    )
    own = row(found, "weighted_sum").to_score[1].faster
    assert own is not None
    assert (own.mean, own.low, own.high) == (1.0, 1.0, 1.0)
    assert [(p.step, p.seconds, p.mean) for p in row(found, "fair").curve][1] == (20, pytest.approx(75), 0.5)


def test_a_curve_that_falls_counts_by_its_monotone_fit() -> None:
    """.6 and .2 become .4 and .4: a lucky evaluation is no score."""
    bumpy: Curve = [(10, 10.0, 0.6), (20, 20.0, 0.2), (30, 30.0, 0.9)]
    (half, _) = row(compared({"weighted_sum": [SLOW] * 2, "fair": [bumpy] * 2}), "fair").to_score
    assert half.seconds == pytest.approx(20 + 10 * (0.5 - 0.4) / (0.9 - 0.4))


def test_who_does_not_get_there() -> None:
    stuck: Curve = [(10, 10.0, 0.3), (20, 20.0, 0.3)]
    found = compared({"weighted_sum": [SLOW] * 3, "fair": [FAST, stuck, stuck], "gdpo": [FAST, FAST, stuck]})
    half, most = row(found, "fair").to_score
    assert (half.reached, half.seconds, half.faster) == (1, None, None)
    assert half.worst == pytest.approx(0.5), "of the seed that gets there"
    assert (row(found, "gdpo").to_score[0].seconds, row(found, "gdpo").to_score[0].faster) == (50.0, None)
    text = markdown(found)
    assert "## Training until the mean share is 0.5 and 0.8 of the final one of weighted_sum" in text
    line = next(line for line in text.split("Training until")[1].splitlines() if line.startswith("| fair"))
    assert line.startswith("| fair | 3 | never (1 of 3) | never (1 of 3) | 0.50 |  |")
    assert most.reached == 1


def test_it_is_shown_everywhere(tmp_path: Path) -> None:
    found = compared({"weighted_sum": [SLOW] * 2, "fair": [FAST] * 2, "gdpo": [[], []]})
    write_table(found, tmp_path)
    assert Comparison.read(tmp_path / "compare.json") == found
    text = (tmp_path / "table.md").read_text()
    assert "| fair | 2 | 50 | 20 | 0.50 | 4.00 (4.00 to 4.00) | 80 | 32 | 0.80 | 4.00 (4.00 to 4.00) |" in text
    assert "time to score: CPU seconds of training, evaluations left out" in text
    assert "no time to score of gdpo: run without --curve" in text
    file = io.StringIO()
    print_table(found, Console(file=file, force_terminal=True, width=200, color_system=None))
    assert "times" in file.getvalue()
    page = comparison_page(tmp_path)
    assert "Time to score" in page
    assert "CPU seconds" in page


def test_a_reference_that_gains_nothing_has_no_level() -> None:
    falls: Curve = [(10, 10.0, -0.1), (20, 20.0, -0.3)]
    found = compared({"weighted_sum": [falls] * 2, "fair": [FAST] * 2})
    assert all(not entry.to_score for entry in found.rows)
    assert "no time to score: it is counted until the mean share of weighted_sum" in markdown(found)


def test_clocks_are_not_mixed() -> None:
    means = {"base": (0.0, 0.0), "only-a": (1.0, 0.0), "only-b": (0.0, 2.0)}
    results = [result(m, seed, {"a": [a], "b": [b]}) for m, (a, b) in means.items() for seed in (0, 1)]
    points = [CurvePoint(step, seconds, {"a": x, "b": 2 * x}) for step, seconds, x in SLOW]
    for method, clock in (("weighted_sum", "CPU"), ("fair", "wall"), ("gdpo", "CPU")):
        results += [result(method, s, {"a": [1.0], "b": [2.0]}, curve=points, clock=clock) for s in (0, 1)]
    found = compare_results(results)
    assert {entry.method for entry in found.rows if entry.to_score} == {"weighted_sum", "gdpo"}
    assert "no time to score of fair: run without --curve, or on another device" in markdown(found)


def test_without_shares_or_curves_there_is_none() -> None:
    found = compared({"weighted_sum": [SLOW] * 2, "fair": [FAST] * 2}, against="base")
    assert all(not entry.to_score for entry in found.rows)
    results = [result(m, s, {"a": [1.0]}, curve=[CurvePoint(1, 1.0, {"a": 1.0})] * 2) for m in "xy" for s in (0, 1)]
    assert all(not entry.to_score and not entry.curve for entry in compare_results(results, "x").rows)


def test_joint_methods_alone_are_evaluated_on_the_way(tiny_sd3: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tiny_sd3, trainer={**base_config(tiny_sd3)["trainer"], "steps": 8})
    jobs = {job.method.name: job for job in plan(config, methods="base,specialists,weighted_sum", seeds=(0,), curve=3)}
    assert len(jobs) > 2
    assert {name for name, job in jobs.items() if job.config.trainer.eval_every == 3} == {"weighted_sum"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--curve", 8), "--curve: 8 is not below trainer.steps: 8 of weighted_sum"),
        (("--curve", 3, "--methods", "weighted_sum,short=trainer.steps=2"), "--curve: 3 is not below trainer.steps: 2"),
        (("--curve", 2, "--set", "prompts.validation=[{name: v, texts: [a cat]}]"), "--curve: with prompts.validation"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], says: str, tiny_sd3: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tiny_sd3, trainer={**base_config(tiny_sd3)["trainer"], "steps": 8})
    outcome = marble("compare", config, "--out", tmp_path / "out", *arguments)
    assert outcome.code == 2
    assert says in outcome.err


@pytest.mark.full
def test_a_comparison_with_curves(tiny_sd3: Path, tmp_path: Path) -> None:
    """Its last evaluation is the one that the table has, though no step that is evaluated is the last; and evaluations
    cost no time."""
    trainer = {**base_config(tiny_sd3)["trainer"], "steps": 4}
    config = write_config(tmp_path / "c.yaml", tiny_sd3, trainer=trainer)
    arguments = ("--methods", "base,weighted_sum", "--seeds", "0", "--curve", "3", "--out", tmp_path / "out")
    outcome = marble("compare", config, *arguments)
    assert outcome.code == 0, outcome.err
    (curved,) = [r for r in read_results(tmp_path / "out").values() if r.method == "weighted_sum"]
    assert [point.step for point in curved.curve] == [3, 4]
    assert curved.curve[-1].means == curved.means
    assert 0 < curved.curve[0].seconds < curved.curve[1].seconds
    lines = read_lines(tmp_path / "out" / "jobs" / "weighted_sum-seed0" / "run" / "metrics.jsonl")
    assert lines[2]["time/evaluate"] > 0
    assert curved.train_seconds == pytest.approx(sum(map(wall_seconds, lines)) - lines[2]["time/evaluate"], abs=1e-3)
