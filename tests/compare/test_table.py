"""The table of results: composites, intervals, differences, holes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from jobs import result, table
from marble_rl.compare.job_result import Failure
from marble_rl.compare.statistics import over_seeds
from marble_rl.compare.table import Comparison, compare_results
from marble_rl.compare.writing import markdown, print_table, write_table
from marble_rl.errors import InputError
from marble_rl.intervals import Interval, paired_difference
from marble_rl.report.comparison import comparison_page


def composites(comparison: Comparison) -> dict[str, float]:
    return {row.method: row.figures["composite"].mean for row in comparison.rows}


def test_composite_by_hand() -> None:
    found = table({"base": [{"a": 1, "b": 10}], "gdpo": [{"a": 2, "b": 10}], "marble": [{"a": 3, "b": 40}]})
    # a: mean 2, std sqrt(2/3); b: mean 20, std sqrt(200)
    z = {"base": (-(1.5**0.5), -(0.5**0.5)), "gdpo": (0.0, -(0.5**0.5)), "marble": (1.5**0.5, 2**0.5)}
    assert composites(found) == pytest.approx({name: (a + b) / 2 for name, (a, b) in z.items()})
    assert [(row.z["a"], row.z["b"]) for row in found.rows] == [pytest.approx(pair) for pair in z.values()]


def test_interval_over_seeds_by_hand() -> None:
    found = over_seeds(np.array([1.0, 2.0, 3.0]))
    assert found == Interval(
        2.0, pytest.approx(2 - 4.302653 / 3**0.5), pytest.approx(2 + 4.302653 / 3**0.5), 3, "seeds"
    )
    (row,) = table({"marble": [{"a": 1.0}, {"a": 2.0}, {"a": 3.0}]}).rows
    assert row.figures["a"] == found
    assert row.seeds == [0, 1, 2]


def test_what_a_seed_does_to_all_methods_alike_does_not_blur_the_composite() -> None:
    effects = (0.0, 5.0, -3.0)
    rows = {name: [{"a": i + e, "b": -i + 2 * e} for e in effects] for i, name in enumerate(["base", "gdpo", "marble"])}
    for row in table(rows).rows:
        assert row.figures["a"].half_width > 1
        assert row.figures["composite"].half_width == pytest.approx(0, abs=1e-9)


def rolled(*methods: tuple[str, int]) -> dict[str, list[dict[str, float]]]:
    """Scores of each method's first seeds, all different."""
    dice = np.random.default_rng(1)
    return {
        name: [dict(zip("abc", dice.normal(size=3).tolist(), strict=True)) for _ in range(n)] for name, n in methods
    }


def test_the_composite_of_several_seeds_is_that_of_their_means() -> None:
    rows = rolled(("base", 5), ("gdpo", 5), ("marble", 5))
    means = {
        name: [{key: float(np.mean([row[key] for row in seeds])) for key in "abc"}] for name, seeds in rows.items()
    }
    assert composites(table(rows)) == pytest.approx(composites(table(means)))


def test_which_seeds_a_method_has_does_not_move_its_composite() -> None:
    effects = (3.0, 0.0, -1.0, -2.0)
    level = {"base": 0.0, "gdpo": 1.0, "marble": 4.0}
    whole = {name: [{"a": x + e, "b": x - e} for e in effects] for name, x in level.items()}
    some = whole | {"gdpo": whole["gdpo"][:1], "marble": whole["marble"][:2]}
    assert composites(table(some)) == pytest.approx(composites(table(whole)))


def test_seeds_are_taken_out_by_least_squares() -> None:
    """As a regression on methods and seeds does it, in another way."""
    rows = rolled(("base", 4), ("gdpo", 2), ("marble", 3))
    entries = [(m, s, scores["a"]) for m, seeds in rows.items() for s, scores in enumerate(seeds)]
    names = list(rows)
    design = np.array([[m == n for n in names] + [s == t for t in range(1, 4)] for m, s, _ in entries], dtype=float)
    fitted = np.linalg.lstsq(design, np.array([x for *_, x in entries]), rcond=None)[0][: len(names)]
    z = (fitted - fitted.mean()) / fitted.std()
    assert {row.method: row.z["a"] for row in table(rows).rows} == pytest.approx(dict(zip(names, z, strict=True)))


def test_differences_are_paired_by_seed() -> None:
    found = table(
        {
            "weighted_sum": [{"a": 1.0, "b": 0.0}, {"a": 5.0, "b": 0.0}, {"a": 9.0, "b": 0.0}],
            "marble": [{"a": 1.9, "b": 1.0}, {"a": 6.0, "b": -1.0}, {"a": 10.1, "b": 0.5}],
            "gdpo": [{"a": 0.5, "b": 0.0}],
        }
    )
    rows = {row.method: row for row in found.rows}
    assert found.against == "weighted_sum"
    assert rows["weighted_sum"].differences == {}
    a, b = rows["marble"].differences["a"], rows["marble"].differences["b"]
    assert (a.mean, a.n, a.significant) == (pytest.approx(1.0), 3, True)
    assert a.half_width == pytest.approx(4.302653 * 0.1 / 3**0.5)
    assert (b.mean, b.significant) == (pytest.approx(1 / 6), False)
    assert not rows["marble"].figures["a"].significant, "unpaired it would not show"
    assert (rows["gdpo"].differences["a"].n, rows["gdpo"].differences["a"].over) == (1, "nothing")


def test_another_method_can_be_compared_with() -> None:
    rows = {"base": [{"a": 1.0}], "marble": [{"a": 3.0}]}
    assert table(rows).against is None
    assert all(not row.differences for row in table(rows).rows)
    assert table(rows, against="base").rows[1].differences["a"].mean == 2.0
    with pytest.raises(InputError, match=r"--against: no results of 'bass'. Did you mean 'base'\?"):
        table(rows, against="bass")


def test_a_method_that_always_crashed_leaves_the_table_without_differences() -> None:
    good = [result(method, 0, {"a": [1.0]}) for method in ("weighted_sum", "marble")]
    crashed = result("gdpo", 0, {}, failed=Failure("train", 3, ["out of luck"]))
    found = compare_results([*good, crashed], "gdpo")
    assert (found.against, [hole.method for hole in found.holes]) == (None, ["gdpo"])


@pytest.mark.parametrize("methods", [3, 5])
def test_the_composites_interval_is_as_wide_as_chance_makes_it(methods: int) -> None:
    """Scores far apart, so that chance hardly moves the scale: then the composite's standard error is
    sigma / std / sqrt(n), whatever the number of methods, and whatever seeds do to all of them."""
    dice, seeds, n = np.random.default_rng(0), 3.0, 5
    level = 100.0 * np.arange(methods)
    squared = []
    for _ in range(200):
        scores = level[:, None] + seeds * dice.normal(size=n) + dice.normal(size=(methods, n))
        rows = {f"m{i}": [{"a": float(x)} for x in row] for i, row in enumerate(scores)}
        squared += [(row.figures["composite"].half_width / 2.776445 * level.std()) ** 2 for row in table(rows).rows]
    assert np.mean(squared) == pytest.approx(1 / n, rel=0.1)


def test_a_seed_that_no_other_method_has_does_not_narrow_the_composites_interval() -> None:
    rows = rolled(("base", 3), ("gdpo", 3), ("marble", 5))
    shared = {name: seeds[:3] for name, seeds in rows.items()}
    more, fewer = (
        next(row for row in table(of).rows if row.method == "marble").figures["composite"] for of in (rows, shared)
    )
    assert (more.n, fewer.n) == (3, 3)
    assert more.half_width == pytest.approx(fewer.half_width, rel=0.2)  # the scale differs, for a_m does


@pytest.mark.parametrize("design", [{"a": "01", "b": "0", "c": "1"}, {"a": "01234", "b": "01", "c": "23", "d": "4"}])
def test_holes_do_not_narrow_the_composites_interval(design: dict[str, str]) -> None:
    """Where few methods share a seed, fitting what the seed does to all takes most of what is left of each."""
    dice, level = np.random.default_rng(0), {name: 100.0 * i for i, name in enumerate(design)}
    inside = []
    for _ in range(300):
        effects = 3 * dice.normal(size=5)
        jobs = [
            result(name, int(seed), {"x": [level[name] + effects[int(seed)] + dice.normal()] * 2})
            for name, seeds in design.items()
            for seed in seeds
        ]
        row = next(row for row in compare_results(jobs).rows if row.method == "a")
        found, true = row.figures["composite"], -np.mean(list(level.values())) / np.std(list(level.values()))
        inside.append(found.low <= true <= found.high)
    assert np.mean(inside) > 0.93


def test_differences_go_by_the_prompts_that_both_have_a_score_of() -> None:
    """A reward that is silent on the hard half of a method's images does not make the method better."""
    easy, hard = [1.0, 0.9, 0.8], [0.1, 0.2, 0.3]
    silent: list[float | None] = [*(x - 0.05 for x in easy), None, None, None]
    for seeds in ((0,), (0, 1)):
        found = compare_results(
            [
                result(method, seed, {"a": scores})
                for seed in seeds
                for method, scores in (("weighted_sum", [*easy, *hard]), ("marble", silent))
            ]
        )
        difference = found.rows[1].differences["a"]
        assert difference.mean == pytest.approx(-0.05)
        assert difference.low <= difference.mean <= difference.high
        assert found.rows[1].figures["a"].mean == pytest.approx(0.85)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_methods_without_a_scored_prompt_in_common_have_no_difference(seeds: tuple[int, ...], tmp_path: Path) -> None:
    """Of the specialist a: it scores other prompts of each. Of b they have one."""
    scores = {"weighted_sum": [1.0, 2.0, None, None], "marble": [None, None, 1.0, 1.5]}
    found = compare_results(
        [
            result(method, seed, {"a": a, "b": [1.0 + seed + (method == "marble"), 2.0, 3.0, 4.0]})
            for seed in seeds
            for method, a in scores.items()
        ]
    )
    assert found.rows[1].differences.keys() == {"b"}
    assert found.rows[1].differences["b"].mean == pytest.approx(0.25)
    write_table(found, tmp_path)
    assert Comparison.read(tmp_path / "compare.json") == found
    text = (tmp_path / "table.md").read_text()
    assert "? no prompt has a score of both methods" in text
    assert "nan" not in text.lower()
    expected = "Better on b." if len(seeds) == 2 else "No reward differs beyond its interval; in one training of each"
    assert expected in comparison_page(tmp_path)


def test_one_prompt_of_one_seed_has_no_interval_and_one_seed_no_arrow() -> None:
    """Resampled, a single prompt is always itself, and would look certain. And two trainings differ anyway."""
    single = compare_results([result("weighted_sum", 0, {"a": [1.0]}), result("marble", 0, {"a": [2.0]})])
    several = compare_results([result("weighted_sum", 0, {"a": [1.0, 1.1]}), result("marble", 0, {"a": [2.0, 2.2]})])
    for found, over in ((single, "nothing"), (several, "prompts")):
        difference = found.rows[1].differences["a"]
        assert (difference.mean > 0.9, difference.over, difference.significant) == (True, over, False)
        assert not any(arrow in markdown(found) for arrow in ("▲", "▼"))
    assert "+1.000‡" in markdown(single)
    assert "‡ one prompt of one seed: no interval" in markdown(single)
    assert difference.low > 0, "though this interval is above 0"


def test_crashed_jobs_leave_marked_holes() -> None:
    """Also in the rows: a method without any result, and one with a part of its seeds."""
    failed = {"failed": Failure("train", 3, ["out of luck"])}
    good = [result("weighted_sum", s, {"a": [1.0, 2.0]}) for s in (0, 1)] + [result("marble", 0, {"a": [1.5, 2.5]})]
    found = compare_results([*good, result("marble", 1, {}, **failed), result("gdpo", 0, {}, **failed)])
    lines = markdown(found).splitlines()
    assert "| gdpo | 0 of 1 | HOLE |  |  |" in lines
    assert any(line.startswith("| marble | 1 of 2 | ") for line in lines)
    assert any(line.startswith("| weighted_sum | 2 | ") for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_terminal_of_any_width_shows_names_and_numbers_whole(width: int) -> None:
    names = [f"reward_{i}" for i in range(8)]
    dice = np.random.default_rng(0)
    found = table({m: [{n: dice.random() for n in names} for _ in range(3)] for m in ("weighted_sum", "marble_n20")})
    file = io.StringIO()
    print_table(found, Console(file=file, force_terminal=True, width=width, color_system=None))
    shown = file.getvalue()
    assert "…" not in shown
    for text in (*names, "weighted_sum", "marble_n20", *(f"{row.figures['reward_3'].mean:.1f}" for row in found.rows)):
        assert text in shown
    assert ("going on" in shown) == (width < 200)


def test_one_seed_is_bootstrapped_over_its_prompts() -> None:
    dice = np.random.default_rng(2)
    before = dice.normal(size=80)
    after = before + 0.3 + 0.2 * dice.normal(size=80)
    some = [None if i % 4 else float(v) for i, v in enumerate(after)]
    one_seed = [
        result("weighted_sum", 0, {"a": before.tolist(), "b": before.tolist()}),
        result("marble", 0, {"a": after.tolist(), "b": some}),
    ]
    found = compare_results(one_seed)
    row = found.rows[1]
    reference = paired_difference(torch.tensor(before), torch.tensor(after))
    difference = row.differences["a"]
    assert (difference.n, difference.over) == (1, "prompts")
    assert difference.mean == pytest.approx(reference.mean)
    assert (difference.low, difference.high) == pytest.approx((reference.low, reference.high), abs=0.005)
    assert difference.half_width < row.figures["a"].half_width / 2
    quarter = np.array(some[::4], dtype=np.float64)
    assert row.figures["b"].half_width == pytest.approx(1.96 * quarter.std() / 20**0.5, rel=0.1)
    assert "†" in markdown(found)
    third = result("gdpo", 0, {"a": before[::-1].tolist(), "b": after[::-1].tolist()})
    of_three = compare_results([*one_seed, third]).rows
    assert all(r.figures["composite"].low < r.figures["composite"].mean < r.figures["composite"].high for r in of_three)


def test_rows_stand_in_the_order_of_the_registry() -> None:
    names = ["own", "marble_n5", "marble", "weighted_sum", "only-a", "base"]
    assert [row.method for row in table({name: [{"a": 1.0}] for name in names}).rows] == names[::-1]


def test_a_reward_that_some_results_lack_is_left_out() -> None:
    found = table({"base": [{"a": 1.0, "b": 2.0}], "marble": [{"a": 3.0}]})
    assert (found.rewards, found.left_out) == (["a"], ["b"])
    assert "left out, because not every result has it: b" in markdown(found)


def test_results_of_other_budgets_or_prompts_do_not_stand_in_one_table() -> None:
    one, other = result("base", 0, {"a": [1.0]}), result("marble", 0, {"a": [1.0]})
    with pytest.raises(InputError, match=r"base seed 0 and marble seed 0 are not of one comparison: trainer.steps was"):
        compare_results([one, other.model_copy(update={"config": {"trainer": {"seed": 0, "steps": 5}}})])
    with pytest.raises(InputError, match="held-out prompts were"):
        compare_results([one, other.model_copy(update={"prompts_hash": "another"})])
