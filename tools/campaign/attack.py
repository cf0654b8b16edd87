"""What one attack found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from tools.campaign.process import Ended

DONE, BAD_INPUT, STOPPED = 0, 2, 3
REFUSED_CPU = 10.0
"""Most seconds of CPU for an input that is refused."""
MESSAGE = 20_000
"""Most characters that a refusal may print."""
MEGABYTES = 1500.0
"""Most memory that a command on the tiny pipeline may need."""


@dataclass(frozen=True)
class Attack:
    """An attack and what is wrong with how it ended; nothing, if ``faults`` is empty."""

    what: str
    """The attack in a few words."""
    ended: Ended
    faults: list[str]

    @property
    def refused(self) -> bool:
        return self.ended.code in (BAD_INPUT, STOPPED)


@dataclass(frozen=True)
class Seeded:
    """What an attack is made from."""

    rng: Random
    folder: Path
    """An empty folder of its own."""


def faults_of(ended: Ended, allowed: tuple[int, ...] = (DONE, BAD_INPUT)) -> list[str]:
    """What no command may do, whatever its input is."""
    faults = []
    if ended.timed_out:
        faults.append("did not end")
    elif ended.code not in allowed:
        faults.append(f"exit {ended.code}")
    if "Traceback (most recent call last)" in ended.text:
        faults.append("traceback")
    if ended.code == BAD_INPUT and ended.cpu > REFUSED_CPU:
        faults.append(f"refused after {ended.cpu:.0f} s of CPU")
    if ended.code == BAD_INPUT and len(ended.text) > MESSAGE:
        faults.append(f"message of {len(ended.text):,} characters")
    if ended.megabytes > MEGABYTES:
        faults.append(f"{ended.megabytes:,.0f} MB")
    return faults
