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
    """Seven refreshes, one every second step, in five parts; the steps between them are left out."""
    worst = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8]
    lines = []
    for i, value in enumerate(worst):
        lines += [refresh(2 * i, value, a=value, b=1 - value), {"step": 2 * i + 1, "reward/a": 7.0}]
    text = printed(lines, ["a", "b"], tmp_path)
    assert "Harmony on unseen samples" in text
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
