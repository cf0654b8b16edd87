"""What is shown of a run and of an evaluation: bootstrap intervals, the summary's tables, pictures side by side."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from marble_rl.evaluation.evaluate import Evaluation
from marble_rl.evaluation.report import EvaluationReport
from marble_rl.inference.model_card import _scores
from marble_rl.intervals import LEVEL, RESAMPLES, Difference, paired_difference, resampled_mean
from marble_rl.runs.images import Card, Picture, comparison
from marble_rl.training.summary import print_summary
from marble_rl.types import Prompt, RewardTable


def normal(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Differences around 0.3; prompts differ more among each other than that, which pairing takes away."""
    covered = 0
    for seed in range(200):
        before = 5 * normal(60, 2 * seed)
        found = paired_difference(before, before + 0.3 + normal(60, 2 * seed + 1))
        covered += found.low <= 0.3 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_constant_difference_has_a_point_as_interval() -> None:
    before = normal(40, 0).round()
    assert paired_difference(before, before + 0.25) == Difference(0.25, 0.25, 0.25)
    assert paired_difference(before, before) == Difference(0.0, 0.0, 0.0)


def test_the_interval_is_about_two_standard_errors_wide() -> None:
    before, after = normal(400, 1), normal(400, 2)
    found = paired_difference(before, after)
    error = float((after - before).std()) / 20
    assert found.mean == pytest.approx(float((after - before).mean()))
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)


def test_the_other_way_round_it_is_the_negative() -> None:
    before, after = normal(30, 1), normal(30, 2)
    there, back = paired_difference(before, after), paired_difference(after, before)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))


def test_intervals_are_seeded() -> None:
    before, after = normal(30, 1).float(), normal(30, 2).float()
    assert paired_difference(before, after) == paired_difference(before, after)
    assert paired_difference(before, after, seed=1) != paired_difference(before, after, seed=2)


@pytest.mark.parametrize("at_once", [1, 1000, 12_345, 1 << 20])
def test_resampling_in_parts_changes_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit what all resamples drawn at once give."""
    values = normal(67, 5).numpy()
    rows = np.random.default_rng(3).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[rows].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    monkeypatch.setattr("marble_rl.intervals.AT_ONCE", at_once)
    assert resampled_mean(values, 3) == (values.mean(), low, high)


@pytest.mark.parametrize(
    ("low", "high", "significant"), [(0.1, 0.3, True), (-0.3, -0.1, True), (-0.1, 0.3, False), (0.0, 0.3, False)]
)
def test_a_difference_is_significant_where_zero_lies_outside(low: float, high: float, significant: bool) -> None:
    assert Difference((low + high) / 2, low, high).significant is significant


def test_large_differences_are_significant_and_chance_is_not() -> None:
    noise = normal(60, 3)
    assert paired_difference(noise, noise + 1 + 0.5 * normal(60, 4)).significant
    assert paired_difference(noise, noise - 1 + 0.5 * normal(60, 4)).significant
    assert not paired_difference(noise, noise + normal(60, 4) - normal(60, 4).mean()).significant


def evaluation(**scores: list[float | None]) -> Evaluation:
    """One image of each prompt."""
    columns = [[0.0 if score is None else score for score in column] for column in scores.values()]
    applicable = [[score is not None for score in column] for column in scores.values()]
    table = RewardTable(tuple(scores), torch.tensor(columns, dtype=torch.float64).T, torch.tensor(applicable).T)
    return Evaluation([Prompt(i, f"prompt {i}", "s") for i in range(len(table.values))], 1, table)


def compared(base: Evaluation, ema: Evaluation, capsys: pytest.CaptureFixture[str]) -> tuple[dict, str, str]:
    """scores.json, the printed table and that of the model card."""
    report = EvaluationReport({"base": base, "ema": ema}, 8, frozenset(), Path("out"))
    scores = json.loads(json.dumps(report.to_json(), allow_nan=False))
    report.print()
    return scores, capsys.readouterr().out, _scores(scores, "ema")


def test_nothing_is_told_from_one_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where others have a score of another reward only: no interval, no verdict."""
    base = evaluation(all=[0.1, 0.2, 0.3], one=[None, 0.25, None])
    scores, table, card = compared(base, evaluation(all=[0.3, 0.4, 0.5], one=[None, 0.75, None]), capsys)
    assert list(scores["differences"]) == ["all"]
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
    assert list(scores["differences"]) == ["all"]
    assert [row.split() for row in table.splitlines() if row.split()[:1] == ["odd"]] == [["odd", "0.5000"]]
    assert ("| odd |  | 0.5000 |  |  |" if silent == "base" else "| odd | 0.5000 |  |  |  |") in card


def test_weights_without_a_common_prompt_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    base, ema = (evaluation(odd=scores) for scores in ([0.1, 0.2, None, None], [None, None, 0.3, 0.4]))
    assert compared(base, ema, capsys)[0]["differences"] == {}


def printed(lines: list[dict[str, float]], rewards: list[str], folder: Path) -> str:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = io.StringIO()
    print_summary(Console(file=output, width=160), file, rewards)
    return output.getvalue()


def rows(text: str) -> list[list[str]]:
    """Cells of the tables' bodies: lines that begin with steps or `all`, whatever the tables' frame."""
    cells = [re.findall(r"[^\s│┃]+", line) for line in text.splitlines()]
    return [row for row in cells if row and re.fullmatch(r"\d+(-\d+)?|all", row[0])]


def refresh(step: int, worst: float, **more: float) -> dict[str, float]:
    return {
        "step": step,
        "reward/a": 9.0,
        "heldout/min_cos": worst,
        "heldout/mean_cos": worst + 0.5,
        "heldout/conflict": 0.25,
        "ws_heldout/min_cos": -worst,
        "ws_heldout/mean_cos": 0.125,
        "ws_heldout/conflict": 0.5,
        **{f"signal/{name}": value for name, value in more.items()},
    }


def test_the_summary_prints_the_means_of_parts(tmp_path: Path) -> None:
    """Seven refreshes, one every second step, in five parts; the steps between them are left out."""
    worst = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8]
    lines = []
    for i, value in enumerate(worst):
        lines += [refresh(2 * i, value, a=value, b=1 - value), {"step": 2 * i + 1, "reward/a": 7.0}]
    text = printed(lines, ["a", "b"], tmp_path)
    assert "Held-out harmony" in text
    assert "Signal" in text
    parts = {"0": 0.1, "2-4": 0.25, "6": 0.4, "8-10": 0.55, "12": 0.8, "all": sum(worst) / 7}
    rest = ["0.12", "0.25", "0.50"]
    harmony = [[at, f"{x:.2f}", f"{-x:.2f}", f"{x + 0.5:.2f}", *rest] for at, x in parts.items()]
    signal = [[at, f"{x:.2f}", f"{1 - x:.2f}"] for at, x in parts.items() if at != "all"]
    assert rows(text) == harmony + signal


def test_fewer_refreshes_than_parts_get_a_row_each(tmp_path: Path) -> None:
    text = printed([refresh(0, 0.5), refresh(10, 0.25)], ["a"], tmp_path)
    assert [(row[0], row[1]) for row in rows(text)] == [("0", "0.50"), ("10", "0.25"), ("all", "0.38")]


def test_signals_are_only_shown_where_there_are_any(tmp_path: Path) -> None:
    assert "Signal" not in printed([refresh(0, 0.5)], ["a", "b"], tmp_path)
    text = printed([refresh(0, 0.5, a=0.5), refresh(1, 0.5, a=0.75, b=0.25)], ["a", "b"], tmp_path)
    assert rows(text)[-2:] == [["0", "0.50"], ["1", "0.75", "0.25"]]
    first, second = (line for line in text.split("Signal")[1].splitlines() if " 0." in line)
    assert first.index("0.50") == second.index("0.75")


def test_many_refreshes_are_divided_evenly(tmp_path: Path) -> None:
    table = rows(printed([refresh(step, step / 10) for step in range(50)], [], tmp_path))
    assert [row[0] for row in table] == ["0-9", "10-19", "20-29", "30-39", "40-49", "all"]
    assert [row[1] for row in table[:-1]] == [f"{i + 0.45:.2f}" for i in range(5)]


def test_a_run_without_refreshes_prints_nothing(tmp_path: Path) -> None:
    assert printed([{"step": 0, "reward/a": 1.0}, {"step": 1, "signal/a": 1.0}], ["a"], tmp_path) == ""
    assert printed([], ["a"], tmp_path) == ""


TILE = 40


def plain(number: int, height: int = 8, width: int = 8) -> torch.Tensor:
    """A picture of one colour that nothing else has."""
    return torch.tensor([10 + number, 200, 90 + 7 * number], dtype=torch.uint8).expand(height, width, 3).contiguous()


def place(sheet: Image.Image, number: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a plain picture; all of it can be seen."""
    pixels = np.asarray(sheet)
    own = (pixels == plain(number)[0, 0].numpy()).all(-1)
    y, x = np.nonzero(own)
    box = (int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1)
    assert own.sum() == (box[2] - box[0]) * (box[3] - box[1])
    return box


def card(*numbers: int) -> Card:
    return Card(f"prompt {numbers}", tuple(Picture(f"w{n}", plain(n), {"r": n / 10, "s": 0.5}) for n in numbers))


def test_every_picture_is_drawn_in_its_place() -> None:
    """Columns of cards, the pictures of a card from left to right."""
    sheet = comparison([[card(0, 1), card(2, 3)], [card(4, 5)]], tile=TILE)
    boxes = [place(sheet, n) for n in range(6)]
    for left, top, right, bottom in boxes:
        assert (right - left, bottom - top) == (TILE, TILE)
        assert left >= 0
        assert right <= sheet.width
        assert bottom <= sheet.height
    for first, second in ((0, 1), (2, 3), (1, 4), (4, 5)):
        assert boxes[first][2] < boxes[second][0]
    for upper, lower in ((0, 2), (1, 3)):
        assert boxes[upper][3] + 20 < boxes[lower][1]
    assert [box[1] for box in boxes] == [boxes[0][1]] * 2 + [boxes[2][1]] * 2 + [boxes[0][1]] * 2
    assert [box[0] for box in boxes[:2]] == [box[0] for box in boxes[2:4]]


def test_pictures_keep_their_proportions() -> None:
    pictures = (Picture("wide", plain(0, 4, 8), {"r": 1.0}), Picture("large", plain(1, 90, 90), {"r": 1.0}))
    sheet = comparison([[Card("x", pictures)]], tile=TILE)
    left, top, right, bottom = place(sheet, 0)
    assert (right - left, bottom - top) == (TILE, TILE // 2)
    left, top, right, bottom = place(sheet, 1)
    assert (right - left, bottom - top) == (TILE, TILE)


def colours_below(sheet: Image.Image, number: int) -> set[str]:
    """Of the text under a picture."""
    left, _, right, bottom = place(sheet, number)
    red, green, blue = np.asarray(sheet).astype(int)[bottom:, left:right].transpose(2, 0, 1)
    tests = {
        "green": green > np.maximum(red, blue) + 40,
        "red": red > np.maximum(green, blue) + 40,
        "grey": (red < 180) & (abs(red - green) < 8) & (abs(green - blue) < 8),
    }
    return {name for name, pixels in tests.items() if pixels.any()}


@pytest.mark.parametrize(("score", "colour"), [(0.6, "green"), (0.4, "red"), (0.502, "grey"), (0.498, "grey")])
def test_scores_show_whether_they_are_better_than_the_first(score: float, colour: str) -> None:
    pictures = tuple(Picture("w", plain(i), {"r": value}) for i, value in enumerate((0.5, score)))
    sheet = comparison([[Card("x", pictures)]], tile=100)
    assert colours_below(sheet, 0) == {"grey"}
    assert colours_below(sheet, 1) == {colour}


@pytest.mark.parametrize(
    ("first", "second"),
    [({"r": 0.5, "s": 0.5}, {"r": 0.9}), ({"r": 0.5}, {"r": 0.9, "s": 0.1}), ({}, {"r": 0.9}), ({}, {})],
)
def test_a_picture_may_lack_a_score(first: dict[str, float], second: dict[str, float]) -> None:
    sheet = comparison([[Card("x", (Picture("a", plain(0), first), Picture("b", plain(1), second)))]], tile=TILE)
    assert place(sheet, 0)[2] < place(sheet, 1)[0]


def test_cards_may_have_other_rewards_and_fewer_pictures() -> None:
    cards = [card(0, 1), Card("y", (Picture("w", plain(2), {"other": 1.0}),))]
    sheet = comparison([cards], tile=TILE)
    assert place(sheet, 2)[0] == place(sheet, 0)[0]


def test_a_long_prompt_stays_above_its_card() -> None:
    short, long = (Card(prompt, card(0).pictures) for prompt in ("x", "word " * 200))
    other = card(1)
    sheets = [comparison([[first], [other]], tile=TILE) for first in (short, long)]
    assert sheets[0].size == sheets[1].size
    middle = sheets[0].width // 2
    assert np.array_equal(np.asarray(sheets[0])[:, middle:], np.asarray(sheets[1])[:, middle:])
