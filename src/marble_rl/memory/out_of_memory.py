"""Out-of-memory errors: which settings help, by the stage in which the error happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from marble_rl.errors import MarbleError, OutOfMemory, RewardFailed, text_of

_PRECISION = "model.dtype: bfloat16 or model.quantize"
_SAMPLING = "model.decoding: sliced (or tiled), " + _PRECISION
HELP = {
    "loading": f"{_PRECISION}, a reward's own device, a smaller model",
    "rollout": f"a smaller rollout.batch_size, {_SAMPLING}",
    "rewards": "a smaller batch_size of the reward, its precision: bfloat16, another device for it",
    "gradients": f"a smaller trainer.micro_batch, model.gradient_checkpointing: true, {_PRECISION}",
    "coefficients": "a smaller lora.rank, fewer rewards",
    "update": "a smaller lora.rank",
    "evaluate": f"a smaller evaluation.batch_size, {_SAMPLING}",
}


@contextmanager
def memory_errors(stage: Callable[[], str], lockstep: bool = False) -> Iterator[None]:
    """Turn an out-of-memory error into an `OutOfMemory` that names the settings that help; ``stage`` returns the name
    of the current stage.

    In ``lockstep`` the error is left as it is: it must end the rank, and with it the run. A rank that caught it would
    leave the others waiting in the middle of a pass.
    """
    if lockstep:
        yield
        return
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
    """CUDA, XPU and Python have a type for it; torch on the CPU and on MPS raises a RuntimeError with a message."""
    messages = ("not enough memory", "can't allocate memory", "backend out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in text_of(error) for text in messages)


def _message(stage: str, error: str) -> str:
    helps = HELP.get(stage, HELP["rollout"])
    return (
        f"out of memory in the stage {stage!r}. What helps: {helps}. Then continue with --resume; "
        f"`marble config show` estimates the memory that a run needs. ({error})"
    )
