"""The processes of a run, as the rest of the package sees them: a `World` that mostly has one.

`torchrun` starts several and tells each of them, in its environment, who it is; `join` reads that. Work is divided over
whole prompt groups, and everything random is drawn by name (seeding.py), so what a run computes does not depend on how
many processes compute it. How they talk is in processes.py; one process never loads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from marble_rl.errors import InputError, MarbleError, ProcessFailed, RunStopped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class World:
    """One process: nothing to divide, nobody to talk to. The base of a world of several."""

    rank = 0
    size = 1
    waited = 0.0
    """Seconds spent in exchanges with other processes so far."""
    lockstep = False
    """The base model is sharded: all processes must make the same forward and backward passes."""

    @property
    def first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> range:
        """Of ``count`` things in a row, those that fall to a process, by default this one. Shares differ by at most
        one thing."""
        rank = self.rank if rank is None else rank
        return range(count * rank // self.size, count * (rank + 1) // self.size)

    def sum_(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all processes."""

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank, for everyone."""
        return [value]

    def gather_first(self, value: T) -> list[T]:
        """Every process's value, by rank, for the first process; nothing for the others."""
        return [value]

    def from_first(self, value: T) -> T:
        """The first process's value, for everyone."""
        return value

    def largest(self, value: int) -> int:
        """The largest of all processes' values."""
        return value

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Where the work inside fails in one process, all raise, and the first of them tells why."""
        yield

    def pick_device(self, name: str, key: str = "model.device") -> torch.device:
        """Where this process trains: of `auto`, the card that is its own. ``key``: where the name was given."""
        from marble_rl.devices import pick_device

        return pick_device(name, key)


def launched() -> int:
    """How many processes were started together for this run."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return launched() == 1 or os.environ["RANK"] == "0"


_joined: World | None = None


def join() -> World:
    """The world of this process: the one that torchrun started, or itself alone. The same one however often."""
    global _joined
    if launched() == 1:
        return World()
    if _joined is None:
        from marble_rl.distributed.processes import Processes

        _joined = Processes()
    return _joined


def leave(error: MarbleError | None = None) -> None:
    """Last words of a process. Where all processes end alike they wait for each other: a launcher that sees one of them
    gone ends the others, and the first one may still have something to print."""
    global _joined
    if _joined is not None:
        from marble_rl.distributed.processes import Processes

        assert isinstance(_joined, Processes)
        _joined.leave(together=error is None or (error.shared and not isinstance(error, ProcessFailed)))
        _joined = None


def check_world(world: World, groups: int, updates: int) -> None:
    """Every process must have a prompt group in every update."""
    each = groups // updates
    if world.size > each:
        raise InputError(
            f"rollout.groups: {groups} groups in rollout.updates: {updates} are {each} an update, too few for "
            f"{world.size} processes: each trains on whole groups. Start no more than {each}, raise "
            "rollout.groups or lower rollout.updates"
        )


def check_same_rewards(world: World, loaded: Sequence[str]) -> None:
    """An optional reward must be there for every process, or for none."""
    everywhere = world.gather(tuple(loaded))
    odd = sorted({name for names in everywhere for name in names if any(name not in other for other in everywhere)})
    if odd:
        ranks = [rank for rank, names in enumerate(everywhere) if odd[0] not in names]
        raise InputError(
            f"rewards: the optional reward {odd[0]!r} cannot be loaded in process {ranks[0]} of {world.size}, but in "
            "others it can; mend that machine, or remove the reward"
        )


def check_same_weights(world: World, flat: Tensor) -> None:
    """Every process must have the same weights, up to rounding: each has made the same updates."""
    norms = world.gather(float(flat.double().norm()))
    if max(norms) - min(norms) > 1e-6 * max(norms):
        raise RunStopped(f"the weights of the processes have come apart: their norms are {norms}. Go on with --resume")
