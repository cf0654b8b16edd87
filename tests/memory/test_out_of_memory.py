"""Out-of-memory errors become a stop that names what helps, except in lockstep."""

from __future__ import annotations

import pytest
import torch

from marble_rl.errors import OutOfMemory, RewardFailed
from marble_rl.memory.out_of_memory import HELP, is_out_of_memory, memory_errors


def full() -> torch.Tensor:
    """More than any machine has: torch's own error on the CPU."""
    return torch.empty(1 << 60, dtype=torch.uint8)


def test_a_real_allocation_that_fails_is_recognised() -> None:
    with pytest.raises(RuntimeError) as error:
        full()
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


@pytest.mark.parametrize("stage", HELP)
def test_the_message_names_the_stage_and_what_helps_there(stage: str) -> None:
    with pytest.raises(OutOfMemory) as error, memory_errors(lambda: stage):
        full()
    assert f"out of memory in the stage {stage!r}. What helps: {HELP[stage]}. Then continue with --resume" in str(
        error.value
    )


def starved_reward() -> None:
    try:
        full()
    except RuntimeError as cause:
        raise RewardFailed("the reward 'ocr' failed") from cause


def test_a_reward_out_of_memory_is_reported_for_the_stage_rewards() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"stage 'rewards'.*the reward 'ocr' failed"),
        memory_errors(lambda: "rollout"),
    ):
        starved_reward()


def test_other_errors_pass_through() -> None:
    for error in (RewardFailed("the server is down"), RuntimeError("a bug"), OutOfMemory("of another rank")):
        with pytest.raises(type(error)) as raised, memory_errors(lambda: "rollout"):
            raise error
        assert raised.value is error


def test_in_lockstep_the_error_ends_the_rank() -> None:
    with pytest.raises(RuntimeError) as raised, memory_errors(lambda: "gradients", lockstep=True):
        full()
    assert not isinstance(raised.value, OutOfMemory)
    assert is_out_of_memory(raised.value)
