"""`marble bench`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from marble_rl.cli.shared import AsJson, Device, print_json, quiet_libraries


def bench(
    out: Annotated[Path, typer.Option(help="Folder for bench.json.")] = Path("runs/bench"),
    rounds: Annotated[int, typer.Option(min=1, help="How often every step is timed.")] = 3,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure what one gradient per reward costs on this machine, compared with a weighted sum.

    Takes up to ten minutes on one CPU core. Every kind of step runs once in each round; speeds are ratios within a
    round.
    """
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # read when numpy is imported
    quiet_libraries()
    from dataclasses import asdict

    from rich.console import Console

    from marble_rl.bench.run import print_bench, run_bench, write_bench
    from marble_rl.bench.workload import Size
    from marble_rl.devices import pick_device
    from marble_rl.storage import output_folder

    with output_folder(out):
        result = run_bench(pick_device(device, "--device"), rounds, Size(), Console(stderr=True))
        if as_json:  # printed before it is written, so that a full disk does not lose minutes of measuring
            print_json(asdict(result))
        else:
            print_bench(result, Console())
        write_bench(result, out)
    if not as_json:
        typer.echo(f"\nWrote {out / 'bench.json'}")
