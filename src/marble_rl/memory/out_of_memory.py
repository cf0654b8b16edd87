"""No memory left: which settings help, by the stage in which it happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from marble_rl.errors import MarbleError, OutOfMemory, RewardFailed

_NUMBERS = "model.dtype: bfloat16 or model.quantize"
_SAMPLING = "model.decoding: sliced (or tiled), " + _NUMBERS
HELP = {
    "loading": f"{_NUMBERS}, a reward's own device, a smaller model",
    "rollout": f"a smaller rollout.batch_size, {_SAMPLING}",
    "rewards": "a smaller batch_size of the reward, its precision: bfloat16, another device for it",
    "gradients": f"a smaller trainer.micro_batch, model.gradient_checkpointing: true, {_NUMBERS}",
    "coefficients": "a smaller lora.rank, fewer rewards",
    "update": "a smaller lora.rank",
    "evaluate": f"a smaller evaluation.batch_size, {_SAMPLING}",
}


@contextmanager
def memory_errors(stage: Callable[[], str]) -> Iterator[None]:
    """Turn running out of memory inside into a stop that says what helps; ``stage`` tells where it happened."""
    try:
        yield
    except RewardFailed as failed:
        if failed.__cause__ is None or not is_out_of_memory(failed.__cause__):
            raise
        raise OutOfMemory(_message("rewards", str(failed))) from failed
    except MarbleError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise OutOfMemory(_message(stage(), first_line or type(error).__name__)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA and Python say it by type, torch on the CPU in words."""
    words = ("not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


def _message(stage: str, error: str) -> str:
    helps = HELP.get(stage, HELP["rollout"])
    return (
        f"out of memory in the stage {stage!r}. What helps: {helps}. Then go on with --resume; "
        f"`marble config show` estimates what is needed. ({error})"
    )
