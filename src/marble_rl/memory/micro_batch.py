"""How many samples a training pass takes; with `trainer.micro_batch: auto`, as many as the memory holds.

It begins with 64, or with all samples of an update if they are fewer. Whenever memory runs out, the same gradients are
computed again with half as many: nothing was changed by the attempt that failed. The size is saved in checkpoints, so
that a resumed run cuts its samples as the uninterrupted one does; the sum over samples is the same up to rounding.

Several processes each find what fits them while they compute; after every update all go on with the smallest size. So
between updates there is one size, which the checkpoint of the first process holds for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from marble_rl.distributed.world import World
from marble_rl.errors import MarbleError
from marble_rl.memory.out_of_memory import is_out_of_memory

T = TypeVar("T")

FIRST = 64


class MicroBatch:
    """The size, and what lowers it."""

    def __init__(
        self, setting: int | Literal["auto"], samples: int = FIRST, say: Callable[[str], None] = print
    ) -> None:
        self._auto = setting == "auto"
        self.size = min(FIRST, samples) if setting == "auto" else setting
        self._say = say

    def applied(self, compute: Callable[[int], T]) -> T:
        """``compute(size)``, with smaller and smaller sizes until memory is enough."""
        while True:
            try:
                return compute(self.size)
            except MarbleError:
                raise  # a stop on purpose, also one that another process ran out of memory for
            except (MemoryError, RuntimeError) as error:
                if not self._auto or self.size == 1 or not is_out_of_memory(error):
                    raise
            # Outside of the handler: the error's traceback held on to the tensors of the failed attempt.
            self.size = (self.size + 1) // 2
            self._say(f"memory ran out: {self._from_here_on}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def agree(self, world: World) -> None:
        """Go on with the smallest size of all processes."""
        if not self._auto:
            return
        smallest = -world.largest(-self.size)
        if smallest < self.size:
            self.size = smallest
            self._say(f"memory ran out in another process: {self._from_here_on}")

    @property
    def _from_here_on(self) -> str:
        return f"{self.size} samples a training pass from here on (trainer.micro_batch: auto)"

    def state_dict(self) -> dict[str, int]:
        """Nothing where the config sets the size: a run that is continued with `auto` begins with 64."""
        return {"size": self.size} if self._auto else {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._auto and state:
            self.size = state["size"]
