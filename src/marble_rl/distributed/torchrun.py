"""Several ranks under torchrun: NCCL (or what torch has for the device) for tensors on GPUs, gloo for everything in the
CPU's memory.

Every collective begins with an all-reduce of one number: is a rank failing? A rank that fails (a reward raised, the
disk is full) answers yes at its next collective, whichever collective the others are about to make. Then the ranks
gather the error messages, and all raise. So a run ends on all ranks after the same step, with one message, and no rank
waits for another that has left.

A rank that dies without an error message closes its connections: gloo's collectives fail at once, NCCL's after the
timeout. After a failed exchange nothing more is exchanged: the others may still wait in it, so a further one would not
meet theirs. Each rank ends by itself, and torchrun ends those that wait.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from marble_rl.devices import accelerator, device_count, pick_device, use_accelerator
from marble_rl.distributed.failed_exchange import TIMEOUT, explained_exchange
from marble_rl.distributed.world import World
from marble_rl.errors import ExchangeFailed, InputError, MarbleError, RankFailed, RunStopped

T = TypeVar("T")

DEFAULT_TIMEOUT = 3600.0
"""Timeout of a collective in seconds. It must cover how much longer a rollout may take on the slowest rank."""
START_TIMEOUT = 180.0
"""Timeout of the exchange at the start in seconds."""
LEAVE_TIMEOUT = timedelta(seconds=30)
"""Timeout of the barrier at the end of the program."""


class DistributedWorld(World):
    """The ranks that torchrun started, as seen from one of them."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        timeout = timedelta(seconds=_timeout())
        if self.local_rank < device_count():
            use_accelerator(self.local_rank)
        self._owns_group = not dist.is_initialized()  # a group that the caller made is the caller's to destroy
        with self._communicating():
            if self._owns_group:
                store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=timeout))
                dist.init_process_group(
                    _backend(),
                    store=PrefixStore(_start_name(store, self.rank, self.size), store),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timeout,
                )
            # Status and small objects go through a separate group, so that they never block gradients.
            self._objects = dist.new_group(backend="gloo", timeout=timeout)

    def sum_(self, tensor: Tensor) -> None:
        self._raise_failures()
        with self._communicating():
            dist.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        self._raise_failures()
        values: list[T | None] = [None] * self.size
        with self._communicating():
            dist.all_gather_object(values, value, group=self._objects)
        return values  # type: ignore[return-value]

    def gather_first(self, value: T) -> list[T]:
        self._raise_failures()
        values: list[T | None] | None = [None] * self.size if self.first else None
        with self._communicating():
            dist.gather_object(value, values, dst=0, group=self._objects)
        return values or []  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        self._raise_failures()
        values = [value]
        with self._communicating():
            dist.broadcast_object_list(values, src=0, group=self._objects)
        return values[0]

    def largest(self, value: int) -> int:
        self._raise_failures()
        return self._maximum(value)

    def check_exchange(self, device: torch.device) -> None:
        try:
            self._raise_failures()
            with self._communicating():
                number = torch.ones((), device=device)
                work = dist.all_reduce(number, async_op=True)
                self._await(work)
                total = number.item()  # raises what failed on the device
            if total != self.size:
                raise ExchangeFailed(f"the sum of {self.size} ones is {total:g}. Try NCCL_P2P_DISABLE=1")
        except RunStopped as failed:
            if failed.shared:  # of a rank that did not come so far
                raise
            raise type(failed)(f"at the start, before any model was loaded, on {device}: {failed}") from failed

    def _await(self, work: dist.Work) -> None:
        """Wait for the first exchange. One that hangs, as NCCL does where cards cannot reach each other, would
        otherwise end the process after the timeout, without a message."""
        limit = min(START_TIMEOUT, _timeout())
        deadline = time.monotonic() + limit
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no result within {limit:g} s, although every rank has begun. Try NCCL_P2P_DISABLE=1"
                )
            time.sleep(0.01)
        work.wait()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.broken is not None or getattr(error, "shared", False):
                raise  # all ranks raise it already, or collectives are no longer possible
            if self.lockstep and not isinstance(error, MarbleError):
                raise  # from the middle of a pass, where the other ranks wait: torchrun ends them with this one
            failure = error
        self._raise_failures(failure)

    def pick_device(self, name: str, key: str = "model.device") -> torch.device:
        """One GPU, or other accelerator, for each rank of a machine."""
        found = accelerator()
        if found is None or name not in ("auto", found.type):
            device = pick_device(name, key)
            if device.type != "cpu":
                raise InputError(
                    f"{key}: {name!r} is one GPU for {self.size} ranks; use auto, which gives each rank its own GPU"
                )
            return device
        if _backend() == "gloo":
            raise InputError(f"{key}: torch has no collectives on {found.type}; use cpu, or start a single process")
        if self.local_rank >= device_count():
            raise InputError(
                f"{key}: {name!r} takes one GPU for each rank, but this machine has {device_count()}, and a local rank "
                f"{self.local_rank}; start it with --nproc-per-node {device_count()}"
            )
        return torch.device(found.type, self.local_rank)

    def leave(self, together: bool) -> None:
        """Destroy the process group; ``together``: after a barrier of all ranks."""
        if together:
            with suppress(RuntimeError):
                dist.monitored_barrier(self._objects, timeout=LEAVE_TIMEOUT)
        if self._owns_group:
            dist.destroy_process_group()

    def _raise_failures(self, failure: Exception | None = None) -> None:
        """Report the ``failure`` of this rank, if any, to all ranks, and raise on all if one of them failed."""
        if not self._maximum(int(failure is not None)):
            return
        reports: list[tuple[type[MarbleError], str] | None] = [None] * self.size
        with self._communicating():
            dist.all_gather_object(reports, self._report(failure), group=self._objects)
        if failure is not None and not isinstance(failure, MarbleError):
            raise failure
        kind, message = next(report for report in reports if report is not None)
        error = kind(message)
        error.shared = True
        raise error from failure

    def _report(self, failure: Exception | None) -> tuple[type[MarbleError], str] | None:
        """What the other ranks raise for it: a class and a message."""
        if failure is None:
            return None
        where = f"rank {self.rank} of {self.size}"
        if not isinstance(failure, MarbleError):
            return RankFailed, f"{where} failed: {type(failure).__name__}: {failure}"
        return type(failure), str(failure) if self.first else f"{failure} ({where})"

    def _maximum(self, value: int) -> int:
        number = torch.tensor(value)
        with self._communicating():
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._objects)
        return int(number)

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        """Around every call of torch.distributed: counts its time, and explains why it failed."""
        if self.broken is not None:
            raise self.broken
        began = time.perf_counter()
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            self.broken = explained_exchange(error, _timeout())
            raise self.broken from error
        finally:
            self.collective_seconds += time.perf_counter() - began


def _backend() -> str:
    """gloo for tensors in the CPU's memory; for those on an accelerator what torch has for it, such as NCCL."""
    found = accelerator()
    name = None if found is None else dist.Backend.default_device_backend_map.get(found.type)
    if found is None or name is None or found.type not in dist.Backend.backend_capability[name]:
        return "gloo"
    return f"cpu:gloo,{found.type}:{name}"


def _start_name(store: Store, rank: int, size: int) -> str:
    """A name that only the ranks of this start share, as the prefix of their keys in torchrun's store.

    The store outlives a restart, with the addresses of ranks that died (pytorch issue 135712), and a rank that reads
    one of those never connects. So rank 0 makes up a name. Another rank cannot know whether the name that it reads is
    the new one or an old one: it stores a fresh random word under that name, and rank 0 confirms this very word.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("marble/name", name)
        for other in range(1, size):
            word = store.get(f"marble/{name}/{other}").decode()
            store.set(f"marble/{name}/{word}", "yes")
        return name
    word = uuid.uuid4().hex
    deadline = time.monotonic() + _timeout()
    while time.monotonic() < deadline:
        name = str(store.get("marble/name").decode())
        store.set(f"marble/{name}/{rank}", word)
        time.sleep(0.05)
        if store.check([f"marble/{name}/{word}"]):  # an old name is never confirmed
            return name
    raise RuntimeError("Timed out waiting for rank 0")


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"{TIMEOUT}: {text!r} is not a number of seconds; give one above 0")
    return seconds
