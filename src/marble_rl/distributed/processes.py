"""Several processes under torchrun: NCCL between GPUs, gloo for everything in the CPU's memory.

Every exchange begins with one number: is anybody failing? A process that fails (a reward raised, the disk is full)
answers yes at its next exchange, whichever exchange the others are about to make; then all of them learn why, and all
raise. So a run ends in all processes after the same step, with one message, and nobody waits for one that has gone.

A process that dies without a word closes its connections: gloo's exchanges fail at once, NCCL's after the timeout.
"""

from __future__ import annotations

import os
import re
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

from marble_rl.devices import pick_device
from marble_rl.distributed.world import World
from marble_rl.errors import InputError, LostProcess, MarbleError, ProcessFailed

T = TypeVar("T")

TIMEOUT = "MARBLE_TIMEOUT"
DEFAULT_TIMEOUT = 3600.0
"""Seconds that a process waits for another one: sampling and rewards of one rollout may take a while longer there."""
FAREWELL = timedelta(seconds=30)


class Processes(World):
    """One of the processes that torchrun started."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        timeout = timedelta(seconds=_timeout())
        cards = torch.cuda.device_count()
        if self.local_rank < cards:
            torch.cuda.set_device(self.local_rank)
        self._made_here = not dist.is_initialized()  # a caller's own group is left to the caller
        with self._talking():
            if self._made_here:
                store, _, _ = next(rendezvous("env://", self.rank, self.size, timeout=timeout))
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if cards else "gloo",
                    store=PrefixStore(_meet(store, self.rank, self.size), store),
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timeout,
                )
            # Status and small objects have a group of their own: they never stand in the way of gradients.
            self._words = dist.new_group(backend="gloo", timeout=timeout)

    def sum_(self, tensor: Tensor) -> None:
        self._nobody_fails()
        with self._talking():
            dist.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        self._nobody_fails()
        found: list[T | None] = [None] * self.size
        with self._talking():
            dist.all_gather_object(found, value, group=self._words)
        return found  # type: ignore[return-value]

    def gather_first(self, value: T) -> list[T]:
        self._nobody_fails()
        found: list[T | None] | None = [None] * self.size if self.first else None
        with self._talking():
            dist.gather_object(value, found, dst=0, group=self._words)
        return found or []  # type: ignore[return-value]

    def from_first(self, value: T) -> T:
        self._nobody_fails()
        box = [value]
        with self._talking():
            dist.broadcast_object_list(box, src=0, group=self._words)
        return box[0]

    def largest(self, value: int) -> int:
        self._nobody_fails()
        return self._maximum(value)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if isinstance(error, LostProcess) or getattr(error, "shared", False):
                raise  # known to all, or nobody is left to tell
            if self.lockstep and not isinstance(error, MarbleError):
                raise  # from the middle of a pass: the others wait there, and the launcher ends them with this process
            failure = error
        self._nobody_fails(failure)

    def pick_device(self, name: str, key: str = "model.device") -> torch.device:
        """A card for each process of a machine."""
        cards = torch.cuda.device_count()
        if name not in ("auto", "cuda") or not cards:
            device = pick_device(name, key)
            if device.type == "cuda":
                raise InputError(
                    f"{key}: {name!r} is one card, but {self.size} processes run; use auto: a card for each"
                )
            return device
        if self.local_rank >= cards:
            raise InputError(
                f"{key}: {name!r} takes one card for each process, but this machine has {cards}, and a process "
                f"number {self.local_rank + 1}; start it with --nproc-per-node {cards}"
            )
        return torch.device("cuda", self.local_rank)

    def leave(self, together: bool) -> None:
        if together:
            with suppress(RuntimeError):
                dist.monitored_barrier(self._words, timeout=FAREWELL)
        if self._made_here:
            dist.destroy_process_group()

    def _nobody_fails(self, failure: Exception | None = None) -> None:
        """Tell the others whether this process fails, and raise if one does."""
        if not self._maximum(int(failure is not None)):
            return
        told: list[tuple[type[MarbleError], str] | None] = [None] * self.size
        with self._talking():
            dist.all_gather_object(told, self._report(failure), group=self._words)
        if failure is not None and not isinstance(failure, MarbleError):
            raise failure
        kind, message = next(report for report in told if report is not None)
        error = kind(message)
        error.shared = True
        raise error from failure

    def _report(self, failure: Exception | None) -> tuple[type[MarbleError], str] | None:
        if failure is None:
            return None
        where = f"process {self.rank} of {self.size}"
        if not isinstance(failure, MarbleError):
            return ProcessFailed, f"{where} failed: {type(failure).__name__}: {failure}"
        return type(failure), str(failure) if self.first else f"{failure} ({where})"

    def _maximum(self, value: int) -> int:
        number = torch.tensor(value)
        with self._talking():
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._words)
        return int(number)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            reason = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]
            raise LostProcess(
                f"another process of this run died, or did not answer within {_timeout():g} s ({TIMEOUT}): {reason}. "
                "Look for its own message; continue with --resume"
            ) from error
        finally:
            self.waited += time.perf_counter() - began


def _meet(store: Store, rank: int, size: int) -> str:
    """A name that the processes of this start have in common, and no others.

    torchrun's store outlives a restart, with the addresses of processes that died (pytorch issue 135712): a process
    that reads one of those never gets through. So the first process makes up a name, and tells each of the others,
    by a word of its own that cannot be an old one, that the name it read is the new one.
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
        if store.check([f"marble/{name}/{word}"]):  # to an old name nobody answers
            return name
    raise RuntimeError("the first process did not answer")


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InputError(f"{TIMEOUT}: {text!r} is not a number of seconds; give one above 0")
    return seconds
