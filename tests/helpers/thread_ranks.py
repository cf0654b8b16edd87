"""Ranks of a distributed run as threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marble_rl.distributed.world import World


class Threads(World):
    """A world of threads: real collectives without processes."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(10)
        values = list(self._table)
        self._barrier.wait(10)
        return values

    def gather_first(self, value: Any) -> list[Any]:
        values = self.gather(value)
        return values if self.first else []

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def largest(self, value: int) -> int:
        return max(self.gather(value))

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))


def in_threads(size: int, work: Callable[[World], Any]) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks, which are threads of this process. Raises the first error."""
    table, barrier, results = [None] * size, threading.Barrier(size), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, table, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    return results


def member(rank: int, size: int) -> World:
    """One rank without the others: for what needs no collective."""
    return Threads(rank, size, [], threading.Barrier(1))
