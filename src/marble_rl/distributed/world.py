"""The ranks of a run, as the rest of the package sees them: a `World`, with a single rank unless started by torchrun.

`torchrun` starts several processes and gives each its rank and the world size as environment variables; `join` reads
them. Work is divided by whole prompt groups, and random numbers are seeded by purpose and index (seeding.py), so the
result depends on the world size only by rounding. The collectives are in torchrun.py, which a run of one rank never
imports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from marble_rl.errors import InputError, MarbleError, RankFailed, RunStopped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class World:
    """A single rank: there is nothing to divide, and every collective returns what it was given. Base class of the
    world of several ranks."""

    rank = 0
    size = 1
    collective_seconds = 0.0
    """Time spent in collectives so far, waiting for other ranks included."""
    lockstep = False
    """The base model is sharded: all ranks must make the same forward and backward passes."""
    broken: RunStopped | None = None
    """Why an exchange failed. From then on every collective raises it: the ranks can no longer talk to each other."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes and prints for all."""
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> range:
        """Which of ``count`` items a rank takes (default: this rank). They are dealt in turn, because neighbours are
        often alike: prompts of one source, which some rewards do not score."""
        return range(self.rank if rank is None else rank, count, self.size)

    def sum_(self, tensor: Tensor) -> None:
        """All-reduce: replace the tensor by its sum over all ranks."""

    def gather(self, value: T) -> list[T]:
        """All-gather: the values of all ranks, in the order of the ranks, on every rank."""
        return [value]

    def gather_first(self, value: T) -> list[T]:
        """Gather to rank 0: there the values of all ranks, in their order; an empty list on the other ranks."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        return value

    def largest(self, value: int) -> int:
        """All-reduce: the largest value of all ranks."""
        return value

    def check_exchange(self, device: torch.device) -> None:
        """One exchange on the device that the ranks train on, so that a run that cannot exchange gradients stops before
        it loads a model."""

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """If the block raises on one rank, it raises on all of them; rank 0 prints the message.

        A collective: all ranks must leave the block within the timeout of each other."""
        yield

    def deferring(self, kind: type[MarbleError]) -> DeferredError:
        """In lockstep, hold an error of this ``kind`` back until all ranks have made their passes; otherwise let it
        through at once. See `DeferredError`."""
        return DeferredError(kind, self.lockstep)

    def pick_device(self, name: str, key: str = "model.device") -> torch.device:
        """The device that this rank trains on; for `auto` on GPUs, the GPU whose index is the local rank. ``key``:
        the setting
        that holds the name, for error messages."""
        from marble_rl.devices import pick_device

        return pick_device(name, key)


class DeferredError:
    """In lockstep, holds back the first error of a rank, so that it still makes the passes that other ranks wait for.
    Not in lockstep it changes nothing: errors leave the ``with`` block as usual.

        failure = world.deferring(RunStopped)
        for batch in batches:
            images = draw(batch)  # a pass of all ranks
            if failure.held is None:
                with failure:
                    score(images)  # may raise on one rank
        failure.raise_held()
    """

    def __init__(self, kind: type[MarbleError], lockstep: bool) -> None:
        self._kind = kind
        self._lockstep = lockstep
        self.held: MarbleError | None = None
        """The first error that was held back."""

    def __enter__(self) -> DeferredError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._lockstep or not isinstance(value, self._kind):
            return False
        self.held = self.held or value
        return True

    def raise_held(self) -> None:
        """Raise the error that was held back, if there is one. To be called after the last pass."""
        if self.held is not None:
            raise self.held


def launched() -> int:
    """The world size: how many processes torchrun started for this run, 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1


def is_first() -> bool:
    """Whether this process is rank 0, which prints."""
    return launched() == 1 or os.environ["RANK"] == "0"


_joined: World | None = None


def join() -> World:
    """The world of this process. Under torchrun, further calls return the same one."""
    global _joined
    if launched() == 1:
        return World()
    if _joined is None:
        from marble_rl.distributed.torchrun import DistributedWorld

        _joined = DistributedWorld()
    return _joined


def leave(error: MarbleError | None = None) -> None:
    """Leave the process group at the end of the program; ``error`` is what ended it.

    If all ranks end for the same reason, they wait for each other: torchrun ends the other ranks as soon as one is
    gone, and rank
    0 may still have something to print."""
    global _joined
    if _joined is not None:
        from marble_rl.distributed.torchrun import DistributedWorld

        assert isinstance(_joined, DistributedWorld)
        _joined.leave(together=error is None or (error.shared and not isinstance(error, RankFailed)))
        _joined = None


def check_world(world: World, groups: int, updates: int) -> None:
    """Refuse a world size that leaves a rank without a prompt group in some update."""
    each = groups // updates
    if world.size > each:
        raise InputError(
            f"rollout.groups: {groups} groups in rollout.updates: {updates} are {each} an update, too few for "
            f"{world.size} ranks: each trains on whole groups. Start at most {each}, raise "
            "rollout.groups or lower rollout.updates"
        )


def check_same_rewards(world: World, loaded: Sequence[str]) -> None:
    """Refuse an optional reward that only some ranks could load."""
    everywhere = world.gather(tuple(loaded))
    odd = sorted({name for names in everywhere for name in names if any(name not in other for other in everywhere)})
    if odd:
        ranks = [rank for rank, names in enumerate(everywhere) if odd[0] not in names]
        raise InputError(
            f"rewards: the optional reward {odd[0]!r} cannot be loaded on rank {ranks[0]} of {world.size}, but on "
            "others it can; install what it needs on that machine too, or remove the reward"
        )


def check_same_weights(world: World, flat: Tensor) -> None:
    """Stop if the norms of the ranks' weights differ by more than rounding: all ranks make the same updates."""
    from marble_rl.devices import in_float64

    norms = world.gather(float(in_float64(flat).norm()))
    if max(norms) - min(norms) > 1e-6 * max(norms):
        raise RunStopped(f"the weights differ between ranks: their norms are {norms}. Continue with --resume")
