"""One optimizer update of DiffusionNFT and Flow-Factory beside ours: the same model, batch and machine.

    python -m tools.peers --diffusion-nft ../DiffusionNFT --flow-factory ../Flow-Factory

Every kind of update runs once in each round, in random order, in one process on one thread; CPU times are compared
within the round, as `marble bench` does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from marble_rl.bench.measure import Spread, seconds
from marble_rl.bench.workload import FAIR, FUSED, LAZY, WEIGHTED_SUM, Size, Step, Workload
from marble_rl.errors import InputError
from tools.peers.checkout import Checkout
from tools.peers.diffusion_nft import FILE as NFT
from tools.peers.diffusion_nft import DiffusionNFT
from tools.peers.flow_factory import FILE as FACTORY
from tools.peers.flow_factory import FlowFactory
from tools.peers.plain import PlainPolicy

OURS = {"weighted sum": WEIGHTED_SUM, "five gradients (marble)": FUSED[5], "five gradients (fair)": FAIR[5]}
Update = Callable[[], None]


def ours(workload: Workload) -> dict[str, Update]:
    """By name: each rule, off-policy and on-policy, without and with lazy regularisation."""

    def update(step: Step, on_policy: bool) -> Update:
        def run() -> None:
            if on_policy:
                workload.become_on_policy()
            else:
                workload.become_off_policy()
            workload.run(step)

        return run

    return {
        f"{rule}, {'on' if on else 'off'}-policy{f', regularize_every: {every}' if every > 1 else ''}": update(
            replace(step, regularize_every=every), on
        )
        for rule, step in OURS.items()
        for on in (False, True)
        for every in (1, LAZY)
    }


def theirs(size: Size, workload: Workload, nft: Path, factory: Path) -> tuple[dict[str, Update], list[str]]:
    """By name, and the commits that they are of."""
    checkouts = Checkout(nft, "--diffusion-nft", NFT), Checkout(factory, "--flow-factory", FACTORY)
    first = DiffusionNFT(checkouts[0], PlainPolicy(size, workload), size.micro_batch)
    updates: dict[str, Update] = {first.name: first.run}
    for off_policy in (True, False):
        peer = FlowFactory(checkouts[1], PlainPolicy(size, workload, off_policy), size.micro_batch, off_policy)
        updates[peer.name] = peer.run
    return updates, [f"DiffusionNFT {checkouts[0].commit}", f"Flow-Factory {checkouts[1].commit}"]


def main(
    diffusion_nft: Annotated[Path, typer.Option(help="Folder of a checkout of NVlabs/DiffusionNFT.")],
    flow_factory: Annotated[Path, typer.Option(help="Folder of a checkout of X-GenGroup/Flow-Factory.")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Print CPU times relative to DiffusionNFT's, as a table in Markdown."""
    torch.set_num_threads(1)
    size = Size()
    workload = Workload(size, torch.device("cpu"))
    try:
        others, commits = theirs(size, workload, diffusion_nft, flow_factory)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    updates = others | ours(workload)
    times: dict[str, list[float]] = {name: [] for name in updates}
    dice = random.Random(0)
    for number in range(rounds + 1):  # the first to warm up
        for name in dice.sample(list(updates), len(updates)):
            spent = seconds(updates[name], torch.device("cpu"))
            times[name] += [spent] if number else []
        typer.echo(f"round {number} of {rounds}", err=True)
    typer.echo("| update | CPU time, DiffusionNFT = 1: median (range) |\n|---|---|")
    for name, spent_by in times.items():
        ratio = Spread.of([a / b for a, b in zip(spent_by, times["DiffusionNFT"], strict=True)])
        typer.echo(f"| {name} | {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |")
    typer.echo(f"\n{', '.join(commits)}; {size.samples} samples of {size.tokens} tokens, {rounds} rounds")


if __name__ == "__main__":
    typer.run(main)
