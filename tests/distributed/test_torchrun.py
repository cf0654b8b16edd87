"""A world under torchrun's environment variables. Several real ranks: tests/invariant/test_several_processes.py."""

from __future__ import annotations

import pytest
import torch

from marble_rl.distributed.torchrun import TIMEOUT, DistributedWorld
from marble_rl.errors import InputError, RewardFailed
from runs import marble


def test_collectives_return_the_values_of_the_only_rank(world: DistributedWorld) -> None:
    tensor = torch.tensor([1.0, 2.0])
    world.sum_(tensor)
    assert tensor.tolist() == [1.0, 2.0]
    assert world.gather("a") == world.gather_first("a") == ["a"]
    assert world.broadcast({"step": 3}) == {"step": 3}
    assert world.largest(-4) == -4
    assert world.collective_seconds > 0


def test_an_error_is_marked_as_raised_by_all_ranks(world: DistributedWorld) -> None:
    with pytest.raises(RewardFailed, match=r"^the server is down$") as error, world.failing_together():
        raise RewardFailed("the server is down")
    assert error.value.shared
    with pytest.raises(RewardFailed) as again, world.failing_together():
        raise error.value
    assert again.value is error.value, "reported twice"


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_unforeseen_error_is_raised_as_it_is(world: DistributedWorld, lockstep: bool) -> None:
    """In lockstep without a collective: the other ranks wait in the middle of a pass and would never answer."""
    world.lockstep = lockstep
    before, bug = world.collective_seconds, ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError) as error, world.failing_together():
        raise bug
    assert error.value is bug
    assert (world.collective_seconds == before) == lockstep


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf"])
def test_the_timeout_is_a_number_of_seconds(launched: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(InputError, match=f"{TIMEOUT}: '{text}' is not a number of seconds; give one above 0"):
        DistributedWorld()


@pytest.mark.parametrize(("rank", "prints"), [("0", True), ("1", False)])
def test_other_commands_are_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch, rank: str, prints: bool) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    outcome = marble("rewards", "list")
    assert outcome.code == 2
    assert ("only train and evaluate run on several ranks" in outcome.err) == prints
