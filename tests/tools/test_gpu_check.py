"""The kit for people with a card, on the CPU: each check can pass, and can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tools.gpu_check import __main__ as smoke
from tools.gpu_check import checks

pytestmark = pytest.mark.full  # maintainers' tools, which rarely change

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [name for name in smoke.CHECKS if name not in ("peak memory", "all cards")])
def test_check_passes_here(name: str) -> None:
    outcome = smoke.run_check(name, smoke.CHECKS[name], CPU)
    assert outcome.passed, outcome.detail
    assert any(character.isdigit() for character in outcome.detail)


@pytest.mark.full
def test_the_whole_of_it_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", "--device", "cpu"], capture_output=True, text=True, check=True
    )
    first, title, *lines, last = done.stdout.splitlines()
    assert (first, last) == ("```text", "```")
    assert title.endswith(f"{len(smoke.CHECKS)} of {len(smoke.CHECKS)} checks passed")
    assert f"torch {torch.__version__}" in lines[1]
    assert [line.split(":")[0] for line in lines[2:]] == [f"ok   {name}" for name in smoke.CHECKS]


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert smoke.main([]) == 2
    assert "torch finds no accelerator" in capsys.readouterr().err
    assert smoke.main(["--device", "meta"]) == 2


def test_a_check_that_fails_or_crashes_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(device: torch.device) -> str:
        raise RuntimeError("out of\nmemory")

    tolerances = dict.fromkeys(checks.FUSED_TOLERANCE, 1e-12)  # closer than rounding
    monkeypatch.setattr(checks, "FUSED_TOLERANCE", tolerances)
    monkeypatch.setattr(
        smoke, "CHECKS", {"crash": crash, "fused": checks.fused_gradients, "last": lambda device: "done"}
    )
    assert smoke.main(["--device", "cpu"]) == 1
    block = capsys.readouterr().out
    assert "1 of 3 checks passed" in block
    assert "FAIL crash: RuntimeError: out of memory" in block
    assert "FAIL fused: CheckFailed: torch.float32: off by" in block
    assert "ok   last: done" in block
