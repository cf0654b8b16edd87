"""Attack marble and count what holds.

python -m tools.campaign --minutes 10                                   # all parts, in turns
python -m tools.campaign --attacks configs=2000 --attacks set=500 --seed 7
python -m tools.campaign --again runs/campaign/failures/configs-17      # one attack again, with what it prints
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

from rich.console import Console
from rich.table import Table

from tools.campaign import crashes, folders, inputs, rewards, server
from tools.campaign.attack import Attack, Seeded
from tools.campaign.process import import_all
from tools.campaign.world import World

PARTS: dict[str, tuple[Callable[[World, Seeded], Attack], float]] = {
    "configs": (inputs.config, 0.2),
    "set": (inputs.override, 0.1),
    "prompts": (inputs.prompts, 0.05),
    "runs": (folders.damaged_run, 0.15),
    "loras": (folders.damaged_lora, 0.05),
    "comparisons": (folders.damaged_comparison, 0.05),
    "kills": (crashes.killed, 0.15),
    "storage": (crashes.failing_disk, 0.1),
    "rewards": (rewards.misbehaving, 0.1),
    "servers": (server.hostile_clients, 0.05),
}
"""By name, the attack and its share of the time."""
PAGE = "attack.json"


@dataclass
class Count:
    """What the attacks of one part came to."""

    attacks: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    """Of the slowest refusal"""
    message: int = 0
    """Characters of the longest refusal"""

    def add(self, attack: Attack, name: str, seconds: float) -> None:
        self.attacks += 1
        self.seconds += seconds
        if attack.refused:
            self.refused += 1
            self.cpu = max(self.cpu, attack.ended.cpu)
            self.message = max(self.message, len(attack.ended.text))
        if attack.faults:
            self.failures.append(name)


def attack(world: World, part: str, number: int, seed: int, folder: Path) -> Attack:
    """Attack ``number`` of a part: the same one whenever the seed is the same."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made, _ = PARTS[part]
    return made(world, Seeded(Random(f"{seed}/{part}/{number}"), folder))


def run_parts(
    world: World,
    found: dict[str, Count],
    counts: dict[str, int],
    minutes: float | None,
    seed: int,
    out: Path,
    say: Callable[[str], None],
) -> None:
    """Attack, part by part, ``counts`` times each or until the time is over."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    while left := [part for part in counts if found[part].attacks < counts[part]]:
        if end is not None and time.monotonic() > end:
            break
        part = min(left, key=lambda name: found[name].seconds / PARTS[name][1])  # each gets its share of the time
        number, start = found[part].attacks, time.monotonic()
        folder = out / "now"
        made = attack(world, part, number, seed, folder)
        name = f"{part}-{number}"
        found[part].add(made, name, time.monotonic() - start)
        if sum(count.attacks for count in found.values()) % 100 == 0:
            say(", ".join(f"{part} {count.attacks}" for part, count in found.items()))
        if made.faults:
            kept = out / "failures" / name
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept / "folder", symlinks=True, ignore_dangling_symlinks=True)
            about = {"part": part, "number": number, "seed": seed, "what": made.what, "faults": made.faults}
            (kept / PAGE).write_text(json.dumps({**about, "command": made.ended.command}, indent=2))
            (kept / "output.txt").write_text(made.ended.text[:1_000_000], errors="replace")
            say(f"{name}: {made.what[:200]}: {', '.join(made.faults)}")
    shutil.rmtree(out / "now", ignore_errors=True)


def table(found: dict[str, Count]) -> Table:
    shown = Table(caption="CPU and characters: of the slowest and of the longest refusal", caption_justify="left")
    for column in ("part", "attacks", "refused", "failures", "CPU", "characters", "time"):
        shown.add_column(column, justify="left" if column == "part" else "right")
    for part, count in found.items():
        limits = (f"{count.cpu:.1f} s", f"{count.message:,}", f"{count.seconds:.0f} s")
        shown.add_row(part, str(count.attacks), str(count.refused), str(len(count.failures)), *limits)
    return shown


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="stop after this time; 10 if no --attacks are given")
    parser.add_argument(
        "--attacks", action="append", default=[], metavar="PART=N", help=f"attacks of a part: {', '.join(PARTS)}"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/campaign"), help="what is attacked, and what succeeded")
    parser.add_argument("--again", type=Path, metavar="FAILURE", help="make a kept attack again")
    given = parser.parse_args(arguments)
    given.counts = {}
    for text in given.attacks:
        part, _, number = text.partition("=")
        if part not in PARTS or not number.isdecimal():
            parser.error(f"--attacks: expected PART=N with one of {', '.join(PARTS)}, got {text!r}")
        given.counts[part] = int(number)
    if not given.counts:
        given.counts = dict.fromkeys(PARTS, 1_000_000)
        given.minutes = 10.0 if given.minutes is None else given.minutes
    return given


def main(arguments: list[str] | None = None) -> int:
    given, console = parse(arguments), Console()
    sys.path.insert(0, os.getcwd())  # forks change their folder, and import the hostile rewards
    import_all()
    out = given.out.resolve()
    world = World(out / "world")
    if given.again:
        kept = json.loads((given.again / PAGE).read_text())
        made = attack(world, kept["part"], kept["number"], kept["seed"], out / "again")
        console.print(f"{made.what}\nmarble {' '.join(made.ended.command)}\n{made.ended.text[-20_000:]}", markup=False)
        console.print(f"exit {made.ended.code}; {', '.join(made.faults) or 'as it should be'}")
        return int(bool(made.faults))
    found = {part: Count() for part in given.counts}

    def say(line: str) -> None:
        console.print(line, markup=False)

    try:
        run_parts(world, found, given.counts, given.minutes, given.seed, out, say)
    except KeyboardInterrupt:
        say("stopped; so far:")
    console.print(table(found))
    failures = sum(len(count.failures) for count in found.values())
    if failures:
        console.print(f"{failures} attacks succeeded: {out / 'failures'}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
