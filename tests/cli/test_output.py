"""stdout and stderr that cannot be written: nothing stops, and nothing is said about it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runs import MARBLE, TESTS, lora_bytes


@contextmanager
def pipe_that_nobody_reads() -> Iterator[int]:
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


def test_a_reader_that_goes_away_is_no_error() -> None:
    with pipe_that_nobody_reads() as pipe:
        done = subprocess.run([*MARBLE, "--help"], stdout=pipe, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        done = subprocess.run([*MARBLE, "bogus"], stdout=subprocess.PIPE, stderr=pipe, text=True)
        assert (done.returncode, done.stdout) == (2, "")


def test_closed_streams_are_no_error() -> None:
    command = f"{' '.join(MARBLE)} --version"
    for closed in (">&-", "2>&-", ">&- 2>&- <&-"):
        done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_file_that_is_cut_short_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MARBLE, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: stdout: No space left on device; the output is incomplete\n"


@pytest.mark.full
def test_a_training_goes_on_without_a_reader(config_file: Path, finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pipe_that_nobody_reads() as pipe:
        command = [*MARBLE, "train", str(config_file), "--out", str(run)]
        assert subprocess.run(command, cwd=TESTS, stdout=pipe, stderr=pipe).returncode == 0
    assert lora_bytes(run) == lora_bytes(finished_run)
    assert "step 8/8" in (run / "train.log").read_text()
