"""Dividing work over processes, and putting results together. Real ones: tests/invariant/test_several_processes.py."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from marble_rl.distributed.processes import TIMEOUT, _timeout
from torch import Tensor

from marble_rl.config import load_config
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.distributed.world import World, check_same_rewards, check_same_weights, check_world, join
from marble_rl.errors import InputError, RunStopped
from marble_rl.gradients.accumulate import GradientAccumulator
from marble_rl.losses.settings import LossConfig
from marble_rl.prompts import load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rewards.core.calls import Counts
from marble_rl.runs.journal import summed_counts
from marble_rl.training.batch import training_batch
from marble_rl.training.experience import gather_table, share_of_groups
from marble_rl.training.sharding import check_sharding
from marble_rl.types import Conditioning, Group, RewardTable, Rollout
from runs import base_config, marble, write_config


class Threads(World):
    """A world of threads: real exchanges without processes."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(10)
        found = list(self._table)
        self._barrier.wait(10)
        return found

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))


def in_threads(size: int, work: Callable[[World], Any]) -> list[Any]:
    """What ``work`` returns in each of ``size`` worlds that talk to each other."""
    table, barrier, results = [None] * size, threading.Barrier(size), [None] * size

    def run(rank: int) -> None:
        results[rank] = work(Threads(rank, size, table, barrier))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def member(rank: int, size: int) -> World:
    return Threads(rank, size, [], threading.Barrier(1))


def draw(groups: int, updates: int) -> tuple[Group, ...]:
    texts = [f"thing {i}" for i in range(groups)]
    return load_prompts([PromptSourceConfig(name="a", texts=texts)], "prompts").draw(0, 0, groups, updates)


def test_one_process_is_a_world_without_exchanges() -> None:
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("groups", "updates"), [(5, 1), (10, 2), (20, 4)])
def test_every_update_is_divided_into_whole_groups(groups: int, updates: int, size: int) -> None:
    drawn = draw(groups, updates)
    shares = [share_of_groups(member(rank, size), drawn) for rank in range(size)]
    assert sorted((group for share in shares for group in share), key=lambda group: group.slot) == list(drawn)
    for update in range(updates):
        counts = [sum(group.update == update for group in share) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert min(counts) >= 1
    assert share_of_groups(member(0, size), drawn, rank=size - 1) == shares[-1]


def test_too_many_processes_are_refused_with_the_numbers() -> None:
    check_world(member(0, 4), groups=16, updates=4)
    with pytest.raises(InputError, match=r"16 groups in rollout\.updates: 4 are 4 an update, too few for 5 processes"):
        check_world(member(0, 5), groups=16, updates=4)


@dataclass(frozen=True)
class Numbers(Conditioning):
    number: Tensor


def rollout_of(share: tuple[Group, ...], drawn: tuple[Group, ...], size: int) -> Rollout:
    """Whose latents and conditioning name the sample: slot * size + sample, and slot."""
    rows = torch.tensor([[group.slot * size + s] for group in share for s in range(size)], dtype=torch.float32)
    slots = torch.tensor([group.slot for group in share])
    return Rollout(share, drawn, size, rows, torch.zeros(len(rows), 1), Numbers(slots), torch.linspace(1, 0, 5))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8])
def test_pieces_have_the_same_numbers_and_noise_whoever_computes_them(size: int, micro_batch: int) -> None:
    """Lazy regularisation chooses pieces by number, and noise is drawn by slot: both as in one process."""
    drawn, group_size = draw(10, 2), 4

    def pieces(share: tuple[Group, ...]) -> set[tuple[Any, ...]]:
        rollout = rollout_of(share, drawn, group_size)
        batch = training_batch(rollout, 1, LossConfig(timesteps_per_sample=2), seed=3, step=7)
        assert batch.x0.untyped_storage().data_ptr() == rollout.x0.untyped_storage().data_ptr(), "a copy"
        found = set()
        for number, rows, level in batch.pieces(micro_batch):
            noise = batch.noise(rows, level)
            for i, row in enumerate(rows.tolist()):
                sample = int(batch.x0[row])
                assert int(batch.conditioning.rows(batch.groups[row : row + 1]).number) == sample // group_size
                half, sigma = int(batch.halves[row]), float(batch.sigmas[row, level])
                found.add((number, level, sample, half, sigma, float(noise[i])))
        assert batch.total_rows == 40
        return found

    alone = pieces(drawn)
    divided = [pieces(share_of_groups(member(rank, size), drawn)) for rank in range(size)]
    assert set.union(*divided) == alone
    assert sum(map(len, divided)) == len(alone) == 40


def test_the_table_of_all_scores_is_in_slot_order_everywhere() -> None:
    drawn, size = draw(10, 2), 3
    values = torch.arange(60, dtype=torch.float64).view(30, 2)
    whole = RewardTable(("a", "b"), values, values % 7 > 1)

    def own(world: World) -> RewardTable:
        rows = [g.slot * size + s for g in share_of_groups(world, drawn) for s in range(size)]
        return gather_table(world, RewardTable(whole.names, values[rows], whole.applicable[rows]), drawn, size)

    for found in in_threads(3, own):
        assert torch.equal(found.values, whole.values)
        assert torch.equal(found.applicable, whole.applicable)


@pytest.mark.parametrize("columns", [0, 3])
def test_gradients_counts_and_sums_are_added_up_in_one_exchange(columns: int) -> None:
    dice = torch.Generator().manual_seed(0)
    inputs, advantages = torch.randn(12, 4, generator=dice), torch.randn(12, columns, generator=dice)
    halves = torch.tensor([0] * 5 + [1] * 7)
    weight = torch.randn(4, generator=dice)

    def gradients(world: World, rows: range) -> tuple[Any, Tensor]:
        w = weight.clone().requires_grad_()
        accumulator = GradientAccumulator(columns, [w], "passes")
        slope = torch.tanh(inputs[list(rows)] @ w)
        accumulator.add(slope, slope**2, advantages[list(rows)], halves[list(rows)])
        sums = accumulator.sum_over(world, torch.tensor([float(len(rows)), 0.5], dtype=torch.float64))
        return accumulator.finish(), sums

    alone, _ = gradients(World(), range(12))
    for found, sums in in_threads(3, lambda world: gradients(world, world.share(12))):
        assert sums.tolist() == [12.0, 1.5]
        for name in ("g", "shared", "gram", "cross", "half_gram"):
            expected, value = getattr(alone, name), getattr(found, name)
            assert (expected is None) == (value is None), name
            if expected is not None:
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


def test_zeros_are_skipped_only_where_nobody_waits() -> None:
    """In lockstep a process makes the passes of columns that are zero for its own samples."""
    passes = []
    for lockstep in (False, True):
        w = torch.ones(2, requires_grad=True)
        accumulator = GradientAccumulator(2, [w], "passes", lockstep=lockstep)
        made: list[int] = []
        slope = torch.ones(3, 2) @ w
        slope.register_hook(lambda grad, made=made: made.append(1))
        accumulator.add(slope, None, torch.zeros(3, 2))
        passes.append(len(made))
        assert not accumulator.finish().g.any()
    assert passes == [0, 2]


def test_counts_of_all_processes_are_summed() -> None:
    parts = [{"ocr": Counts(calls=2, retries=1, seconds=0.5)}, {"ocr": Counts(calls=3, seconds=1.0)}]
    assert summed_counts(parts) == {"ocr": Counts(calls=5, retries=1, seconds=1.5)}


def test_a_signal_that_one_process_got_stops_all() -> None:
    def received(world: World) -> bool:
        interrupts = Interrupts(lambda text: None, agree=lambda signum: max(world.gather(signum)))
        interrupts._received = 15 if world.rank == 1 else None
        return interrupts.pending()

    assert in_threads(3, received) == [True, True, True]


def test_a_signal_that_comes_while_the_others_are_asked_is_not_lost() -> None:
    def asking(noted: int) -> int:
        signal.raise_signal(signal.SIGTERM)
        return noted

    with Interrupts(lambda text: None, agree=asking, launched=True) as interrupts:
        assert not interrupts.pending(), "the others do not know of it yet"
        assert interrupts.pending()


def test_a_launcher_may_hand_on_a_signal_twice() -> None:
    told: list[str] = []
    with Interrupts(told.append, launched=True) as interrupts:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.pending()
    assert told == ["SIGTERM: finishing this step, then saving."]


def test_what_must_be_the_same_everywhere() -> None:
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
    assert "optional reward 'b' cannot be loaded in process 1 of 2" in missing[0] == missing[1]
    assert outcome(lambda world: check_same_weights(world, torch.ones(3))) == ["fine", "fine"]
    apart = outcome(lambda world: check_same_weights(world, torch.ones(3) + 1e-4 * world.rank))
    assert "have come apart" in apart[0]


@pytest.mark.parametrize(
    ("changes", "size", "says"),
    [
        ([], 1, "there is one process"),
        (["rollout.groups=6"], 2, "3 groups an update for 2 processes"),
        (["trainer.micro_batch=3"], 2, "trainer.micro_batch: 3 does not divide rollout.group_size: 4"),
        (["loss.regularize_every=2"], 2, "loss.regularize_every: 2"),
    ],
)
def test_sharding_refuses_what_would_break_the_step(
    tiny_sd3: Path, tmp_path: Path, changes: list[str], size: int, says: str
) -> None:
    path = write_config(tmp_path / "c.yaml", tiny_sd3, trainer={**base_config(tiny_sd3)["trainer"], "micro_batch": 4})
    check_sharding(load_config(path, ["trainer.shard_base=true"]), member(0, 2))
    with pytest.raises(InputError, match=says):
        check_sharding(load_config(path, ["trainer.shard_base=true", *changes]), member(0, size))


def test_other_commands_are_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        outcome = marble("rewards", "list")
        assert outcome.code == 2
        assert ("only train and evaluate run in several processes" in outcome.err) == told


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf"])
def test_the_timeout_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert _timeout() == 3600
    monkeypatch.setenv(TIMEOUT, text)
    with pytest.raises(InputError, match=TIMEOUT):
        _timeout()
