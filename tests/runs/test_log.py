"""metrics.jsonl and the progress display."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from marble_rl.distributed.world import World
from marble_rl.errors import InputError
from marble_rl.runs.log import Display, MetricsFile
from marble_rl.runs.metrics_lines import read_lines
from marble_rl.runs.run_log import LOG, logging_to


def test_metrics_file_drops_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(4):
        file.append(step, {"b": 1.0, "a": 0.5})
    with open(path, "a") as torn:
        torn.write('{"step": 4, "rew')
    MetricsFile(path, 2).append(2, {"a": 9.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2] == {"step": 2, "a": 9.0}
    assert list(lines[0]) == ["step", "a", "b"]


def test_lines_that_are_dropped_are_kept_beside_the_log(tmp_path: Path) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "metrics.dropped.jsonl"
    file = MetricsFile(path, 0)
    for step in range(4):
        file.append(step, {"a": 0.5})
    whole = path.read_bytes().splitlines(keepends=True)
    assert MetricsFile(path, 4).dropped == 0
    assert not kept.exists()
    assert MetricsFile(path, 3).dropped == 1
    assert MetricsFile(path, 1).dropped == 2
    assert path.read_bytes() == whole[0]
    assert kept.read_bytes() == whole[3] + whole[1] + whole[2]


def test_the_file_of_dropped_lines_forgets_the_oldest(tmp_path: Path) -> None:
    path, kept = tmp_path / "metrics.jsonl", tmp_path / "metrics.dropped.jsonl"
    line = b'{"step": 5, "text": "%s"}\n' % (b"x" * (1 << 20))
    kept.write_bytes(b'{"step": 1}\n' + 15 * line)
    path.write_bytes(line)
    MetricsFile(path, 0)
    assert kept.read_bytes() == 15 * line
    assert path.read_bytes() == b""


DAMAGED_LINES = {
    "not UTF-8": b'{"step": 1, "a\xff": 2}',
    "no UTF-8 at all": bytes(range(128, 256)),
    "NUL": b"\0" * 40,
    "cut short": b'{"step": 1, "rew',
    "nested": b"[" * 50_000,
    "no object": b"true",
    "no step": b'{"a": 1}',
    "an endless step": b'{"step": Infinity}',
    "a step that is none": b'{"step": true}',
    "a huge step": b'{"step": 1' + b"0" * 30 + b"}",
    "a number of 5,000 digits": b'{"step": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("damage", DAMAGED_LINES)
def test_a_damaged_line_counts_as_none(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [b'{"step": 0, "a": 0.5}\n', b'{"step": 1, "a": 1.5}\n']
    path.write_bytes(whole[0] + DAMAGED_LINES[damage] + b"\n" + whole[1])
    assert [line["a"] for line in read_lines(path)] == [0.5, 1.5]
    file = MetricsFile(path, 2)
    assert (file.logged, file.dropped) == (2, 1)
    assert path.read_bytes() == b"".join(whole)
    assert (tmp_path / "metrics.dropped.jsonl").read_bytes() == DAMAGED_LINES[damage] + b"\n"


def test_a_log_that_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    for name in ("folder", "loop", "pipe", "huge"):
        with pytest.raises(InputError, match=f"cannot read .*{name}: "):
            MetricsFile(tmp_path / name, 0)


@pytest.mark.parametrize("terminal", [True, False])
def test_display_shows_stage_rewards_and_time_left(terminal: bool, tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=150, color_system=None)
    display = Display(console, total=4, done=1, rewards=["ocr", "bright"], print_every=1)
    with logging_to(tmp_path, World(), console), display.progress:
        with display.stage("rollout"):
            display.within(1, 0.5)
        assert 0.0 <= display.take_times()["time/rollout"] < 5
        assert display.take_times().keys() == {"time/cpu"}
        display.step_done(2, {"reward/ocr": 0.25})
        with display.stage("gradients"):
            display.progress.refresh()
    shown = text.getvalue()
    assert "ocr 0.250" in shown
    assert "2/4" in shown
    assert "left" in shown
    assert ("gradients" in shown) == terminal
    assert "step 2/4  ocr 0.250" in (tmp_path / "train.log").read_text()


def test_cpu_time_is_counted_without_evaluations() -> None:
    def work(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    display = Display(Console(quiet=True), total=4, done=0, rewards=[], print_every=1)
    with display.stage("rollout"):
        work(0.05)
    with display.stage("evaluate"):
        work(0.5)
    worker = threading.Thread(target=work, args=(0.05,))
    worker.start()
    worker.join()
    assert 0.07 <= display.take_times()["time/cpu"] < 0.4  # the clock has steps of 0.01
    assert display.take_times()["time/cpu"] < 0.1


def test_a_log_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    def stopped() -> None:
        with logging_to(tmp_path / "gone", World(), Console(quiet=True)):
            LOG.warning("nobody reads this")
            raise RuntimeError("the real one")

    with pytest.raises(RuntimeError, match="the real one"):
        stopped()


def test_what_json_cannot_hold_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, 0).append(3, {"loss/kl": float("nan"), "a": 1.0, "reward/x": float("-inf")})
    assert json.loads(path.read_text(), parse_constant=refuse) == {"step": 3, "a": 1.0}
    assert "step 4 has no finite loss/kl, reward/x; left out of metrics.jsonl" in caplog.text
