"""`marble bench` on a transformer that is small enough for a test."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from marble_rl.bench import run
from marble_rl.bench.measure import Spread, largest_difference, peak_memory, qp_microseconds, time_rounds
from marble_rl.bench.workload import FUSED, PASSES, STEPS, WEIGHTED_SUM, Size, Workload

SMALL = Size(layers=2, heads=1, latent=4, text_tokens=3, rank=2, samples=4, micro_batch=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(SMALL, CPU)


def test_the_full_size_is_what_the_page_says() -> None:
    assert Size().tokens == 304
    assert Size().samples // Size().micro_batch == 4


def test_both_methods_agree(workload: Workload) -> None:
    assert largest_difference(workload, FUSED[5], PASSES) < 1e-5


@pytest.mark.full
def test_every_step_is_timed_in_every_round(workload: Workload) -> None:
    seen = []
    rounds = time_rounds(workload, 2, lambda step: seen.append(step.name))
    assert [set(r) for r in rounds] == [{step.name for step in STEPS}] * 2
    assert all(seconds > 0 for r in rounds for seconds in r.values())
    assert sorted(seen) == sorted([step.name for step in STEPS] * 2)
    assert seen[: len(STEPS)] != seen[len(STEPS) :]  # no step always follows the same one


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_ratios() -> None:
    names = {step.name: 1.0 for step in STEPS} | {FUSED[5].name: 2.0, PASSES.name: 4.0, FUSED[50].name: 3.0}
    claims = run._claims([names])
    assert claims["every step, K=5"].median == 0.5
    assert claims["every step, K=5, by K+1 passes"].median == 0.25
    assert claims["every 10 steps, K=5"].median == pytest.approx(10 / 11)
    assert claims["cost of K=50 over K=5"].median == 1.5


@pytest.mark.full
def test_memory_is_that_of_a_process_of_its_own() -> None:
    """Not of the one that asks, however much that one holds."""
    ballast = torch.ones(3 * 2**27)
    peak = peak_memory(WEIGHTED_SUM, SMALL, CPU)
    assert 50 * 2**20 < peak < ballast.nbytes


@pytest.mark.full
def test_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MEMORY_OF", (WEIGHTED_SUM, FUSED[5]))
    monkeypatch.setattr(run, "QP_SIZES", (3,))
    bench = run.run_bench(CPU, 1, SMALL, Console(file=io.StringIO()))
    run.write_bench(bench, tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert stored["speed"]["weighted sum"]["median"] == 1.0
    assert stored["fused_error"] < 1e-5
    assert stored["peak_bytes"]["fused, K=5"] > 0
    assert stored["workload"]["samples"] == 4
    printed = io.StringIO()
    run.print_bench(bench, Console(file=printed, width=120))
    for word in ("weighted sum", "fused, K=50", "us at K=3", "MiB"):
        assert word in printed.getvalue()


def test_the_qp_is_timed() -> None:
    assert 1 < qp_microseconds(3, calls=5) < 1e6
