"""Dividing a step's work over ranks, and joining the results. Real ranks: tests/invariant/test_several_processes.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marble_rl.config import load_config
from marble_rl.distributed.world import World
from marble_rl.errors import InputError
from marble_rl.gradients.accumulate import GradientAccumulator
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.prompts import load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rewards.core.calls import Counts
from marble_rl.runs.journal import summed_counts
from marble_rl.training.batch import training_batch
from marble_rl.training.experience import gather_table, share_of_groups
from marble_rl.training.sharding import check_sharding
from marble_rl.types import Conditioning, Group, RewardTable, Rollout
from runs import base_config, write_config
from thread_ranks import in_threads, member


def draw(groups: int, updates: int) -> tuple[Group, ...]:
    texts = [f"thing {i}" for i in range(groups)]
    return load_prompts([PromptSourceConfig(name="a", texts=texts)], "prompts").draw(0, 0, groups, updates)


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
def test_micro_batches_have_the_same_numbers_and_noise_whoever_computes_them(size: int, micro_batch: int) -> None:
    """Lazy regularisation chooses pieces by number, and noise is drawn by slot: both as in one process."""
    drawn, group_size = draw(10, 2), 4

    def micro_batches(share: tuple[Group, ...]) -> set[tuple[Any, ...]]:
        rollout = rollout_of(share, drawn, group_size)
        batch = training_batch(rollout, 1, Nft(NftSettings(timesteps_per_sample=2)), seed=3, step=7)
        assert batch.x0.untyped_storage().data_ptr() == rollout.x0.untyped_storage().data_ptr(), "a copy"
        samples = set()
        for number, rows, level in batch.micro_batches(micro_batch):
            noise = batch.noise(rows, level)
            for i, row in enumerate(rows.tolist()):
                sample = int(batch.x0[row])
                assert int(batch.conditioning.rows(batch.groups[row : row + 1]).number) == sample // group_size
                half, sigma = int(batch.halves[row]), float(batch.sigmas[row, level])
                samples.add((number, level, sample, half, sigma, float(noise[i])))
        assert batch.total_rows == 40
        return samples

    alone = micro_batches(drawn)
    divided = [micro_batches(share_of_groups(member(rank, size), drawn)) for rank in range(size)]
    assert set.union(*divided) == alone
    assert sum(map(len, divided)) == len(alone) == 40


def test_the_table_of_all_scores_is_in_slot_order_everywhere() -> None:
    drawn, size = draw(10, 2), 3
    values = torch.arange(60, dtype=torch.float64).view(30, 2)
    whole = RewardTable(("a", "b"), values, values % 7 > 1)

    def own(world: World) -> RewardTable:
        rows = [g.slot * size + s for g in share_of_groups(world, drawn) for s in range(size)]
        return gather_table(world, RewardTable(whole.names, values[rows], whole.applicable[rows]), drawn, size)

    for table in in_threads(3, own):
        assert torch.equal(table.values, whole.values)
        assert torch.equal(table.applicable, whole.applicable)


@pytest.mark.parametrize("columns", [0, 3])
def test_gradients_counts_and_sums_are_added_up_in_one_all_reduce(columns: int) -> None:
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
    for result, sums in in_threads(3, lambda world: gradients(world, world.share(12))):
        assert sums.tolist() == [12.0, 1.5]
        for name in ("g", "shared", "gram", "cross", "half_gram"):
            expected, value = getattr(alone, name), getattr(result, name)
            assert (expected is None) == (value is None), name
            if expected is not None:
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)


def test_passes_of_zeros_are_skipped_except_in_lockstep() -> None:
    """In lockstep a rank makes the passes of columns that are zero for its own samples."""
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


def test_counts_of_all_ranks_are_summed() -> None:
    parts = [{"ocr": Counts(calls=2, retries=1, seconds=0.5)}, {"ocr": Counts(calls=3, seconds=1.0)}]
    assert summed_counts(parts) == {"ocr": Counts(calls=5, retries=1, seconds=1.5)}


@pytest.mark.parametrize(
    ("changes", "size", "says"),
    [
        ([], 1, "there is one rank"),
        (["rollout.groups=6"], 2, "3 groups an update for 2 ranks"),
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
