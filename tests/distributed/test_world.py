"""Shares of the work, checks that all ranks agree, and errors that a rank in lockstep defers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from marble_rl.distributed.world import World, check_same_rewards, check_same_weights, check_world, join
from marble_rl.errors import InputError, NonFinite, RewardFailed, RunStopped
from thread_ranks import in_threads, member


def test_a_world_of_one_rank_has_nothing_to_communicate() -> None:
    world = join()
    assert type(world) is World
    assert world.first
    assert list(world.share(5)) == [0, 1, 2, 3, 4]
    value = torch.ones(2)
    world.sum_(value)
    assert value.tolist() == [1, 1]
    assert (world.gather(3), world.gather_first(3), world.broadcast(3), world.largest(3)) == ([3], [3], 3, 3)
    with pytest.raises(KeyError), world.failing_together():
        raise KeyError


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_dealt_in_turn(size: int) -> None:
    shares = [list(member(rank, size).share(10)) for rank in range(size)]
    assert sorted(item for share in shares for item in share) == list(range(10))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(later - item == size for share in shares for item, later in itertools.pairwise(share))
    assert list(member(0, size).share(10, rank=size - 1)) == shares[-1]


def test_too_many_ranks_are_refused_with_the_numbers() -> None:
    check_world(member(0, 4), groups=16, updates=4)
    with pytest.raises(InputError, match=r"16 groups in rollout\.updates: 4 are 4 an update, too few for 5 ranks"):
        check_world(member(0, 5), groups=16, updates=4)


def test_what_must_be_the_same_on_all_ranks() -> None:
    def outcome(work: Callable[[World], None]) -> list[str]:
        def run(world: World) -> str:
            try:
                work(world)
            except (InputError, RunStopped) as error:
                return str(error)
            return "fine"

        return in_threads(2, run)

    assert outcome(lambda world: check_same_rewards(world, ["a", "b"])) == ["fine", "fine"]
    missing = outcome(lambda world: check_same_rewards(world, ["a", "b"][: 2 - world.rank]))
    assert "optional reward 'b' cannot be loaded on rank 1 of 2" in missing[0] == missing[1]
    assert outcome(lambda world: check_same_weights(world, torch.ones(3))) == ["fine", "fine"]
    apart = outcome(lambda world: check_same_weights(world, torch.ones(3) + 1e-4 * world.rank))
    assert "the weights differ between ranks" in apart[0]


def passes_made(world: World, failing: dict[int, Exception]) -> tuple[list[int], list[int], Exception | None]:
    """Three passes, with work after each that may raise: passes made, work done, and the error at the end."""
    passes, done = [], []
    failure = world.deferring(RunStopped)
    try:
        for i in range(3):
            passes.append(i)
            if failure.held is None:
                with failure:
                    if i in failing:
                        raise failing[i]
                    done.append(i)
        failure.raise_held()
    except Exception as error:
        return passes, done, error
    return passes, done, None


@pytest.mark.parametrize("lockstep", [False, True])
def test_in_lockstep_an_error_waits_for_the_last_pass(lockstep: bool) -> None:
    world = World()
    world.lockstep = lockstep
    assert passes_made(world, {}) == ([0, 1, 2], [0, 1, 2], None)
    first, second = RewardFailed("first"), NonFinite("second")
    passes, done, raised = passes_made(world, {1: first, 2: second})
    assert passes == ([0, 1, 2] if lockstep else [0, 1])
    assert done == [0]
    assert raised is first


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_error_of_another_kind_is_never_deferred(lockstep: bool) -> None:
    world = World()
    world.lockstep = lockstep
    bug = ZeroDivisionError("a bug")
    assert passes_made(world, {1: bug}) == ([0, 1], [0], bug)


def test_a_deferred_error_of_one_rank_leaves_the_collectives_of_all_in_step() -> None:
    def run(world: World) -> tuple[list[Any], str]:
        world.lockstep = True
        failure, sums = world.deferring(RunStopped), []
        for i in range(3):
            sums.append(sum(world.gather(i)))
            if failure.held is None:
                with failure:
                    if world.rank == 1 and i == 0:
                        raise RewardFailed("the reward of rank 1")
        try:
            failure.raise_held()
        except RewardFailed as error:
            return sums, str(error)
        return sums, ""

    assert in_threads(2, run) == [([0, 2, 4], ""), ([0, 2, 4], "the reward of rank 1")]
