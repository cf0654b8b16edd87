"""How many samples a training pass takes; with `trainer.micro_batch: auto`, as many as fit into memory.

`auto` begins with 64, or with all samples of an update if they are fewer. After an out-of-memory error the same
gradients are computed again with half as many: the failed attempt has changed nothing. The size is saved in
checkpoints, so that a resumed run uses the micro-batches of the uninterrupted one; the sum over samples is the same up
to rounding.

Each of several ranks lowers its own size while it computes. After every update all continue with the smallest. So
between updates there is one size, which the checkpoint that rank 0 writes holds for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

from marble_rl.devices import empty_cache
from marble_rl.distributed.world import World
from marble_rl.errors import MarbleError, count_of
from marble_rl.memory.out_of_memory import is_out_of_memory

T = TypeVar("T")

FIRST = 64


class MicroBatch:
    """The current size, lowered after out-of-memory errors."""

    def __init__(
        self, setting: int | Literal["auto"], samples: int = FIRST, say: Callable[[str], None] = print
    ) -> None:
        self._auto = setting == "auto"
        self.size = min(FIRST, samples) if setting == "auto" else setting
        self._say = say

    def with_retries(self, compute: Callable[[int], T]) -> T:
        """``compute(size)``, tried with smaller and smaller sizes until it fits into memory."""
        while True:
            try:
                return compute(self.size)
            except MarbleError:
                raise  # a stop on purpose, perhaps because another rank is out of memory
            except (MemoryError, RuntimeError) as error:
                if not self._auto or self.size == 1 or not is_out_of_memory(error):
                    raise
            # Outside of the handler, because the error's traceback keeps the tensors of the failed attempt alive.
            self.size = (self.size + 1) // 2
            self._say(f"out of memory: {self._new_size}")
            empty_cache()

    def agree(self, world: World) -> None:
        """Continue with the smallest size of all ranks."""
        if not self._auto:
            return
        smallest = -world.largest(-self.size)
        if smallest < self.size:
            self.size = smallest
            self._say(f"out of memory on another rank: {self._new_size}")

    @property
    def _new_size(self) -> str:
        return f"{count_of(self.size, 'sample')} a training pass from here on (trainer.micro_batch: auto)"

    def state_dict(self) -> dict[str, int]:
        """Empty if the config sets the size: such a run, resumed with `auto`, begins with 64."""
        return {"size": self.size} if self._auto else {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self._auto and state:
            self.size = state["size"]
