"""Dividing a step's work over ranks, and joining the results. Real ranks: tests/invariant/test_several_processes.py."""

from __future__ import annotations

from collections.abc import Callable
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
from marble_rl.training.batch import TrainingBatch, training_batch
from marble_rl.training.experience import gather_table, shares_of_groups
from marble_rl.training.sharding import check_sharding
from marble_rl.types import Conditioning, Group, RewardTable, Rollout
from runs import base_config, marble, write_config
from thread_ranks import in_threads, member


def draw(groups: int, updates: int) -> tuple[Group, ...]:
    texts = [f"thing {i}" for i in range(groups)]
    return load_prompts([PromptSourceConfig(name="a", texts=texts)], "prompts").draw(0, 0, groups, updates)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("groups", "updates"), [(5, 1), (10, 2), (20, 4)])
def test_every_update_is_divided_into_whole_groups(groups: int, updates: int, size: int) -> None:
    drawn = draw(groups, updates)
    shares = shares_of_groups(drawn, size)
    assert sorted((group for share in shares for group in share), key=lambda group: group.slot) == list(drawn)
    for update in range(updates):
        counts = [sum(group.update == update for group in share) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert min(counts) >= 1
    assert all([group.slot for group in share] == sorted(group.slot for group in share) for share in shares)


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
@pytest.mark.parametrize(("every", "noise"), [(1, "sample"), (3, "sample"), (3, "group")])
def test_samples_are_treated_alike_whoever_computes_them(size: int, micro_batch: int, every: int, noise: Any) -> None:
    """The samples that lazy regularisation chooses, and the noise: as in one process."""
    drawn, group_size = draw(10, 2), 4
    loss = Nft(NftSettings(timesteps_per_sample=2, regularize_every=every, noise=noise))

    def micro_batches(share: tuple[Group, ...]) -> tuple[set[tuple[Any, ...]], list[int]]:
        rollout = rollout_of(share, drawn, group_size)
        batch = training_batch(rollout, 1, loss, seed=3, step=7)
        assert batch.x0.untyped_storage().data_ptr() == rollout.x0.untyped_storage().data_ptr(), "a copy"
        samples, sizes = set(), []
        for rows, level, regularize in batch.micro_batches(micro_batch):
            noise = batch.noise(rows, level)
            sizes.append(len(rows))
            assert len(batch.halves[rows].unique()) == 1
            for i, row in enumerate(rows.tolist()):
                sample = int(batch.x0[row])
                assert int(batch.conditioning.rows(batch.groups[row : row + 1]).number) == sample // group_size
                half, sigma = int(batch.halves[row]), float(batch.sigmas[row, level])
                samples.add((regularize, level, sample, half, sigma, float(noise[i])))
        assert batch.total_rows == 40
        assert sum(sizes) == len(samples)
        return samples, sizes

    alone, _ = micro_batches(drawn)
    divided = [micro_batches(share) for share in shares_of_groups(drawn, size)]
    assert set.union(*(samples for samples, _ in divided)) == alone
    assert sum(len(samples) for samples, _ in divided) == len(alone) == 40
    assert {regularize for regularize, *_ in alone} == ({True} if every == 1 else {True, False})
    # A rank fills its micro-batches, but for the last of each half, noise level and kind.
    kinds = 2 * 2 * min(every, 2)
    assert all(sum(n < micro_batch for n in sizes) <= kinds for _, sizes in divided)


def batch_of(drawn: tuple[Group, ...], step: int = 0, **settings: Any) -> TrainingBatch:
    """Of the first of two updates, all ranks' groups of 4 samples."""
    return training_batch(rollout_of(drawn, drawn, 4), 0, Nft(NftSettings(**settings)), seed=0, step=step)


def test_micro_batches_are_pieces_of_each_half_those_that_are_regularised_first() -> None:
    batch = batch_of(draw(10, 2), timesteps_per_sample=2)
    pieces = [part for half in (0, 1) for part in (batch.halves == half).nonzero()[:, 0].split(8)]
    assert len(pieces[1]) == 4, "the last piece of a half is smaller"
    made = [(rows.tolist(), level, regularize) for rows, level, regularize in batch.micro_batches(8)]
    assert made == [(piece.tolist(), level, True) for piece in pieces for level in (0, 1)]

    lazy = batch_of(draw(10, 2), timesteps_per_sample=2, regularize_every=2)
    order = [(not regularize, int(lazy.halves[rows[0]])) for rows, _, regularize in lazy.micro_batches(8)]
    assert order == sorted(order)
    assert len(set(order)) == 4


@pytest.mark.parametrize("every", [1, 2, 3, 4, 6])
def test_every_sample_is_regularised_as_often(every: int) -> None:
    """At each of its noise levels, in one of ``every`` steps. The same positions of every group, if it can be divided
    evenly; else about as many in each step."""
    chosen = torch.stack(
        [batch_of(draw(4, 2), step, regularize_every=every).regularized for step in range(600)]
    ).float()
    if 4 % every == 0:
        assert (chosen.view(600, 2, 4, -1) == chosen.view(600, 2, 4, -1)[:, :1]).all()
    else:
        counts = chosen.sum(dim=1)
        assert counts.min() >= 8 // every - 1
        assert counts.max() <= 8 // every + 1
    assert (chosen.mean(0) - 1 / every).abs().max() < 0.08
    if every == 2:
        assert (chosen.view(600, 2, 4, -1).sum(2) == 2).all()


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_of_a_sharded_model_make_the_same_passes(size: int) -> None:
    """Their groups are of other halves, and their noise is another."""
    drawn, loss = draw(10, 1), Nft(NftSettings(timesteps_per_sample=3, regularize_every=2))
    passes = []
    for share in shares_of_groups(drawn, size):
        batch = training_batch(rollout_of(share, drawn, 4), 0, loss, seed=0, step=3)
        passes.append([(len(rows), regularize) for rows, _, regularize in batch.micro_batches(2)])
    assert all(rank == passes[0] for rank in passes)


def test_a_group_shares_its_noise_and_levels_and_every_second_noise_is_mirrored() -> None:
    everyone = torch.arange(20)
    shared, own = (batch_of(draw(10, 2), timesteps_per_sample=3, noise=noise) for noise in ("group", "sample"))
    noise = torch.stack([shared.noise(everyone, level) for level in range(3)]).view(3, 5, 4)
    assert (noise == noise[:, :, :1]).all()
    assert torch.equal(noise[1], -noise[0])
    assert len(noise[0].unique()) == len(noise[[0, 2]].unique()) // 2 == 5
    sigmas = shared.sigmas.view(5, 4, 3)
    assert (sigmas == sigmas[:, :1]).all()
    assert all(len(set(row)) == 3 for row in shared.sigmas.tolist())
    assert len(torch.stack([own.noise(everyone, level) for level in range(3)]).unique()) == 60
    some = torch.tensor([7, 1, 6])
    assert torch.equal(shared.noise(some, 1), shared.noise(everyone, 1)[some])


PAPER = {"geneval": 12, "ocr": 12, "general": 24}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("counts", [PAPER, {"a": 18, "b": 18, "c": 12}, {"a": 1, "b": 47}, {"a": 5, "b": 43}])
def test_the_groups_of_each_source_are_spread_over_the_ranks(size: int, updates: int, counts: dict[str, int]) -> None:
    sources = [
        PromptSourceConfig(name=name, share=count, texts=[f"{name} {i}" for i in range(count)])
        for name, count in counts.items()
    ]
    drawn = load_prompts(sources, "prompts").draw(0, 0, 48, updates)
    shares = shares_of_groups(drawn, size)
    assert sorted(group.slot for share in shares for group in share) == list(range(48))

    def spread(chosen: Callable[[Group], bool]) -> int:
        each = [sum(chosen(group) for group in share) for share in shares]
        return max(each) - min(each)

    for update in range(updates):
        assert spread(lambda group, update=update: group.update == update) <= 1
    for name in counts:  # equally many of each update comes first
        assert spread(lambda group, name=name: group.prompt.source == name) <= (1 if updates == 1 else 2)


def test_the_table_of_all_scores_is_in_slot_order_everywhere() -> None:
    drawn, size = draw(10, 2), 3
    values = torch.arange(60, dtype=torch.float64).view(30, 2)
    whole = RewardTable(("a", "b"), values, values % 7 > 1)

    def own(world: World) -> RewardTable:
        rows = [g.slot * size + s for g in shares_of_groups(drawn, world.size)[world.rank] for s in range(size)]
        return gather_table(world, RewardTable(whole.names, values[rows], whole.applicable[rows]), drawn, size)

    for table in in_threads(3, own):
        assert torch.equal(table.values, whole.values)
        assert torch.equal(table.applicable, whole.applicable)


@pytest.mark.parametrize(("columns", "halves_on"), [(0, 1), (3, 1), (3, 7)])
def test_gradients_counts_and_sums_are_added_up_in_one_all_reduce(columns: int, halves_on: int) -> None:
    dice = torch.Generator().manual_seed(0)
    inputs, advantages = torch.randn(12, 30, generator=dice), torch.randn(12, columns, generator=dice)
    halves = torch.tensor([0] * 5 + [1] * 7)
    weight = torch.randn(30, generator=dice)

    def gradients(world: World, rows: range) -> tuple[Any, Tensor]:
        w = weight.clone().requires_grad_()
        accumulator = GradientAccumulator(columns, [w], "passes", halves_on=halves_on)
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
        (["loss.regularize_every=2"], 2, "one in loss.regularize_every: 2 is regularised"),
    ],
)
def test_sharding_refuses_what_would_break_the_step(
    tiny_sd3: Path, tmp_path: Path, changes: list[str], size: int, says: str
) -> None:
    path = write_config(tmp_path / "c.yaml", tiny_sd3, trainer={**base_config(tiny_sd3)["trainer"], "micro_batch": 4})
    check_sharding(load_config(path, ["trainer.shard_base=true"]), member(0, 2))
    with pytest.raises(InputError, match=says):
        check_sharding(load_config(path, ["trainer.shard_base=true", *changes]), member(0, size))


def test_rewards_of_several_ranks_on_one_gpu_are_refused_before_anything_is_loaded(
    tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = [{"name": "bright", "type": "brightness", "device": "cuda:1"}]
    path = write_config(tmp_path / "c.yaml", tiny_sd3, rewards=rewards)
    for module in ("train", "using"):
        monkeypatch.setattr(f"marble_rl.cli.{module}.join", lambda: member(0, 2))
    for arguments in (["train", path], ["evaluate", tiny_sd3, "--config", path]):
        outcome = marble(*arguments, "--out", tmp_path / "out")
        assert outcome.code == 2
        assert "error: rewards (bright).device: 'cuda:1' is the same for every rank" in outcome.err
    assert not (tmp_path / "out").exists()
