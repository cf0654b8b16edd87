"""The ranks of a training loop that is not ours: the default process group, if the caller made one."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from marble_rl.distributed.world import World


class CallersGroup(World):
    """The caller made the group, and ends it; nothing here sets it up or checks on other ranks."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


def callers_world() -> World:
    """A single rank where torch.distributed was not initialised."""
    return CallersGroup() if dist.is_available() and dist.is_initialized() else World()
