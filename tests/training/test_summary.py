"""The tables that a run prints at its end."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

from rich.console import Console

from marble_rl.training.summary import print_summary


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
    """Seven refreshes, one every second step, in five parts; the steps between them are left out. Steps count from 1,
    in metrics.jsonl from 0."""
    worst = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8]
    lines = []
    for i, value in enumerate(worst):
        lines += [refresh(2 * i, value, a=value, b=1 - value), {"step": 2 * i + 1, "reward/a": 7.0}]
    text = printed(lines, ["a", "b"], tmp_path)
    assert "Harmony on unseen samples" in text
    assert "Signal" in text
    parts = {"1": 0.1, "3-5": 0.25, "7": 0.4, "9-11": 0.55, "13": 0.8, "all": sum(worst) / 7}
    rest = ["0.12", "0.25", "0.50"]
    harmony = [[at, f"{x:.2f}", f"{-x:.2f}", f"{x + 0.5:.2f}", *rest] for at, x in parts.items()]
    signal = [[at, f"{x:.2f}", f"{1 - x:.2f}"] for at, x in parts.items() if at != "all"]
    assert rows(text) == harmony + signal


def test_of_fewer_than_five_refreshes_nothing_is_said(tmp_path: Path) -> None:
    """One refresh can have a conflict of 1.00 or 0.00, and either would look like a result."""
    text = printed([refresh(0, 0.5, a=0.5)], ["a"], tmp_path)
    assert "too few refreshes to say (1, where 5 are needed)" in text
    assert rows(text) == []
    five = printed([refresh(10 * i, 0.5, a=0.5) for i in range(5)], ["a"], tmp_path)
    assert "too few" not in five
    assert [row[0] for row in rows(five)] == ["1", "11", "21", "31", "41", "all", "1", "11", "21", "31", "41"]


def test_signals_are_only_shown_where_there_are_any(tmp_path: Path) -> None:
    before = [refresh(step, 0.5) for step in range(3)]
    assert "Signal" not in printed([*before, refresh(3, 0.5), refresh(4, 0.5)], ["a", "b"], tmp_path)
    text = printed([*before, refresh(3, 0.5, a=0.5), refresh(4, 0.5, a=0.75, b=0.25)], ["a", "b"], tmp_path)
    assert rows(text)[-2:] == [["4", "0.50"], ["5", "0.75", "0.25"]]
    first, second = (line for line in text.split("Signal")[1].splitlines() if " 0." in line)
    assert first.index("0.50") == second.index("0.75")


def test_many_refreshes_are_divided_evenly(tmp_path: Path) -> None:
    table = rows(printed([refresh(step, step / 10) for step in range(50)], [], tmp_path))
    assert [row[0] for row in table] == ["1-10", "11-20", "21-30", "31-40", "41-50", "all"]
    assert [row[1] for row in table[:-1]] == [f"{i + 0.45:.2f}" for i in range(5)]


def test_a_run_without_refreshes_prints_nothing(tmp_path: Path) -> None:
    assert printed([{"step": 0, "reward/a": 1.0}, {"step": 1, "signal/a": 1.0}], ["a"], tmp_path) == ""
    assert printed([], ["a"], tmp_path) == ""
