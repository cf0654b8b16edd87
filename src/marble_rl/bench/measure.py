"""Measurements of time and memory.

Times are compared only within a round, in which every kind of step runs once, one after the other in one process:
ratios are stable on a noisy machine, seconds are not. On a CPU it is CPU time of this process, on one thread.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from marble_rl.balancing.min_norm import min_norm
from marble_rl.bench.workload import STEPS, Size, Step, Workload
from marble_rl.devices import peak_bytes, synchronize


@dataclass(frozen=True)
class Spread:
    """Median and range of a measurement over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


Round = dict[str, float]
"""Seconds of each kind of step, by its name."""


def time_rounds(workload: Workload, rounds: int, on_step: Callable[[Step], None]) -> list[Round]:
    """Time every kind of step in each round, in random order, after one step to warm up."""
    workload.run(STEPS[0])
    dice = random.Random(0)
    measured = []
    for _ in range(rounds):
        order = list(STEPS)
        dice.shuffle(order)
        times: Round = {}
        for step in order:
            on_step(step)
            times[step.name] = seconds(lambda step=step: workload.run(step), workload.batch.x0.device)  # type: ignore[misc]
        measured.append(times)
    return measured


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """CPU time on the CPU, wall-clock time elsewhere."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    start = clock()
    work()
    synchronize(device)
    return clock() - start


def largest_difference(workload: Workload, fused: Step, passes: Step) -> float:
    """Difference between the gradients of both methods, relative to their length: the largest over all rewards and the
    shared part."""
    one, other = workload.gradients(fused).gradients, workload.gradients(passes).gradients
    rows = [*zip(one.g, other.g, strict=False), (one.shared, other.shared)]  # the fused one also has the probe
    return max(float((a - b).norm() / b.norm()) for a, b in rows)


def qp_microseconds(rewards: int, calls: int = 200) -> float:
    """Median time to solve the QP for Gram matrices of random gradients."""
    dice = torch.Generator().manual_seed(rewards)
    times = []
    for _ in range(calls):
        g = torch.randn(rewards, 4 * rewards, dtype=torch.float64, generator=dice) + 0.1
        gram = g @ g.T
        start = time.perf_counter()
        min_norm(gram)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def peak_memory(step: Step, size: Size, device: torch.device) -> int:
    """Peak memory of a fresh process that makes this step: resident memory, or on CUDA what torch allocated."""
    request = json.dumps({"step": step.name, "size": vars(size), "device": str(device)})
    answer = subprocess.run(
        [sys.executable, "-m", "marble_rl.bench.measure", request], check=True, capture_output=True, text=True
    )
    return int(json.loads(answer.stdout.splitlines()[-1])["bytes"])


def _measure_here(request: str) -> None:
    """The fresh process of `peak_memory`."""
    wanted = json.loads(request)
    torch.set_num_threads(1)
    device = torch.device(wanted["device"])
    workload = Workload(Size(**wanted["size"]), device)
    step = next(step for step in STEPS if step.name == wanted["step"])
    workload.run(step)
    print(json.dumps({"bytes": peak_bytes(device)}))


if __name__ == "__main__":
    _measure_here(sys.argv[1])
