"""`marble bench`: all measurements, as tables and as `bench.json`."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from marble_rl import __version__
from marble_rl.bench.measure import Round, Spread, largest_difference, peak_memory, qp_microseconds, time_rounds
from marble_rl.bench.workload import (
    FAIR,
    FAIR_LAZY,
    FUSED,
    FUSED_LAZY,
    LAZY,
    PASSES,
    STEPS,
    WEIGHTED_SUM,
    WEIGHTED_SUM_LAZY,
    Size,
    Step,
    Workload,
)
from marble_rl.devices import device_name
from marble_rl.storage import storage_errors, write_json

BENCH = "bench.json"
AMORTISED_OVER = 10
MEMORY_OF = (WEIGHTED_SUM, PASSES, FUSED[5], FUSED[50], *FAIR.values())
QP_SIZES = (5, 20, 50)


@dataclass(frozen=True)
class Bench:
    """All measurements. Speeds are relative to a step of the same round; above 1 is faster."""

    machine: dict[str, str]
    workload: dict[str, int]
    seconds: dict[str, Spread]
    speed: dict[str, Spread]
    """Relative to the weighted-sum step without lazy regularisation."""
    claims: dict[str, Spread]
    """The ratios in docs/performance.md."""
    fused_error: float
    """Largest relative difference between fused gradients and K passes."""
    qp_microseconds: dict[int, float]
    peak_bytes: dict[str, int]
    buffer_bytes: dict[int, int]


def run_bench(device: torch.device, rounds: int, size: Size, console: Console) -> Bench:
    """Make all measurements, with a progress bar on the console."""
    torch.set_num_threads(1)
    with Progress(
        TextColumn("{task.description:<24}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=rounds * len(STEPS) + len(MEMORY_OF) + len(QP_SIZES))

        def next_is(name: str) -> None:
            progress.update(task, description=name, advance=0 if not progress.tasks[task].description else 1)

        workload = Workload(size, device)
        next_is("fused against passes")
        error = largest_difference(workload, FUSED[5], PASSES)
        progress.update(task, description="")
        times = time_rounds(workload, rounds, lambda step: next_is(step.name))
        qp = {}
        for k in QP_SIZES:
            next_is(f"QP, K={k}")
            qp[k] = qp_microseconds(k)
        peaks = {}
        for step in MEMORY_OF:
            next_is(f"memory: {step.name}")
            peaks[step.name] = peak_memory(step, size, device)
        progress.update(task, completed=progress.tasks[task].total)
    return Bench(
        machine=_machine(device),
        workload={
            "parameters": workload.parameters,
            "trained_parameters": workload.trained_parameters,
            "tokens": size.tokens,
            "samples": size.samples,
            "micro_batch": size.micro_batch,
            "rounds": rounds,
        },
        seconds={step.name: Spread.of([r[step.name] for r in times]) for step in STEPS},
        speed={step.name: _ratio(times, WEIGHTED_SUM, step) for step in STEPS},
        claims=_claims(times),
        fused_error=error,
        qp_microseconds=qp,
        peak_bytes=peaks,
        buffer_bytes={k: workload.buffer_bytes(k) for k in (5, 50)},
    )


def _ratio(times: list[Round], over: Step, under: Step) -> Spread:
    return Spread.of([r[over.name] / r[under.name] for r in times])


def _claims(times: list[Round]) -> dict[str, Spread]:
    def amortised(r: Round) -> float:
        plain = r[WEIGHTED_SUM.name]  # a step of MARBLE between refreshes computes the same
        return plain / ((r[FUSED[5].name] + (AMORTISED_OVER - 1) * plain) / AMORTISED_OVER)

    return {
        "every step, K=5": _ratio(times, WEIGHTED_SUM, FUSED[5]),
        "every step, K=5, by K+1 passes": _ratio(times, WEIGHTED_SUM, PASSES),
        f"every {AMORTISED_OVER} steps, K=5": Spread.of([amortised(r) for r in times]),
        "every step, K=5, both lazy": _ratio(times, WEIGHTED_SUM_LAZY, FUSED_LAZY),
        "every step, K=5, lazy, against plain NFT": _ratio(times, WEIGHTED_SUM, FUSED_LAZY),
        "cost of K=50 over K=5": _ratio(times, FUSED[50], FUSED[5]),
        "fair, K=5": _ratio(times, WEIGHTED_SUM, FAIR[5]),
        "fair, K=5, both lazy": _ratio(times, WEIGHTED_SUM_LAZY, FAIR_LAZY),
        "fair, K=5, lazy, against plain NFT": _ratio(times, WEIGHTED_SUM, FAIR_LAZY),
    }


def print_bench(bench: Bench, console: Console) -> None:
    """Tables for people."""
    w = bench.workload
    console.print(
        f"Random SD3 transformer, {w['parameters'] / 1e6:.0f} M parameters, "
        f"LoRA of {w['trained_parameters'] / 1e6:.2f} M; "
        f"{w['samples']} samples of {w['tokens']} tokens in micro-batches of {w['micro_batch']}; "
        f"{w['rounds']} rounds on {bench.machine['device']}\n",
        soft_wrap=True,
    )
    table = Table(title="One optimizer step, after sampling", title_justify="left")
    for name in ("step", "seconds", "speed", "lowest", "highest", "peak memory"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for name, speed in bench.speed.items():
        peak = bench.peak_bytes.get(name)
        table.add_row(
            name,
            f"{bench.seconds[name].median:.2f}",
            f"{speed.median:.2f}x",
            f"{speed.low:.2f}x",
            f"{speed.high:.2f}x",
            "" if peak is None else f"{peak / 2**20:.0f} MiB",
        )
    console.print(table)
    console.print(f"speed: against the weighted-sum step of the same round. lazy: one in {LAZY} samples regularised.\n")
    claims = Table(title="Ratios", title_justify="left")
    for name in ("", "median", "lowest", "highest"):
        claims.add_column(name, justify="left" if not name else "right")
    for name, spread in bench.claims.items():
        claims.add_row(name, *(f"{value:.2f}" for value in (spread.median, spread.low, spread.high)))
    weighted = bench.peak_bytes[WEIGHTED_SUM.name]
    for step in MEMORY_OF[1:]:
        claims.add_row(f"peak memory of {step.name}", f"{bench.peak_bytes[step.name] / weighted:.2f}", "", "")
    console.print(claims)
    console.print(f"Largest difference between fused gradients and K passes: {bench.fused_error:.1e} of their length")
    console.print("The QP alone: " + ", ".join(f"{us:.0f} us at K={k}" for k, us in bench.qp_microseconds.items()))
    console.print(
        "Gradient buffer: " + ", ".join(f"{b / 2**20:.0f} MiB at K={k}" for k, b in bench.buffer_bytes.items())
    )


def write_bench(bench: Bench, folder: Path) -> None:
    """Write `bench.json`."""
    with storage_errors(str(folder), "measure again"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / BENCH, asdict(bench))


def _machine(device: torch.device) -> dict[str, str]:
    name = f"one thread of {_processor()}" if device.type == "cpu" else device_name(device)
    return {"device": name, "torch": torch.__version__, "python": platform.python_version(), "marble": __version__}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
