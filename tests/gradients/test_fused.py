"""One backward pass for all rewards against one pass for each (docs/method.md, section 4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

from marble_rl import GradientAccumulator, RewardGradients, fuse, reward_gradients
from marble_rl.distributed.world import World
from marble_rl.gradients import fused as fused_module
from marble_rl.gradients.accumulate import FusedMismatch
from marble_rl.models import load_model
from marble_rl.models.sd3 import SD3Model

N = 8
COLUMNS = [1, 5, 50]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def columns(count: int) -> Tensor:
    """Advantages [N, J]: from the third column on masked where a reward does not apply, the second one all zero."""
    advantages = seeded(N, count, seed=count)
    advantages[::2, 2:] = 0.0
    advantages[:, 1:2] = 0.0
    return advantages


def assert_same(found: RewardGradients, expected: RewardGradients, relative: float = 1e-5) -> None:
    """Every column and the shared part, each relative to its own length."""
    rows = [*zip(found.g, expected.g, strict=True), (found.shared, expected.shared)]
    for j, (row, wanted) in enumerate(rows):
        assert (row - wanted).norm() <= relative * wanted.norm(), j
    scale = expected.norms[:, None] * expected.norms
    assert ((found.gram - expected.gram).abs() <= 3 * relative * scale).all()


# Single layers


class Net(nn.Module):
    """What a trainable transformer may hold besides adapters: biases, norms, a layer used twice, pooled vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.rms = nn.RMSNorm(8)
        self.pooled = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.into(x)))
        hidden = hidden + self.twice(torch.tanh(self.twice(hidden)))
        hidden = self.rms(hidden) * self.pooled(hidden.mean(1))[:, None]
        y: Tensor = self.out(hidden).mean(1)
        return y


def gradients(
    model: nn.Module, x: Tensor, advantages: Tensor, method: Any, run: Callable[[Tensor], Tensor] | None = None
) -> RewardGradients:
    y = (run or model)(x)
    halves = torch.arange(N) % 2
    return reward_gradients(
        y[:, 0] ** 2, y[:, 1] ** 2, advantages, [p for p in model.parameters() if p.requires_grad],
        halves=halves, method=method,
    )  # fmt: skip


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


@pytest.mark.parametrize("count", COLUMNS)
def test_layers_of_every_kind(net: Net, count: int) -> None:
    x = seeded(N, 5, 6)
    expected = gradients(net, x, columns(count), "passes")
    assert fuse(net) == 6
    found = gradients(net, x, columns(count), "fused")
    assert found.by_passes == ()
    assert_same(found, expected)
    torch.testing.assert_close(found.cross, expected.cross, rtol=1e-4, atol=1e-7)
    assert_same(gradients(net, x, columns(count), "passes"), expected)


def test_a_scratch_space_for_less_than_one_sample(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    x = seeded(N, 5, 6)
    expected = gradients(net, x, columns(5), "passes")
    fuse(net)
    for numbers in (1, 150):
        monkeypatch.setattr(fused_module, "SCRATCH", numbers)
        assert_same(gradients(net, x, columns(5), "fused"), expected)


def test_outputs_and_ordinary_gradients_stay(net: Net) -> None:
    x = seeded(N, 5, 6)
    before = net(x)
    plain = torch.autograd.grad(before.square().sum(), list(net.parameters()))
    names = list(net.state_dict())
    fuse(net)
    assert fuse(net) == 6  # a second time changes nothing
    after = net(x)
    assert list(net.state_dict()) == names
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
    for own, ours in zip(plain, torch.autograd.grad(after.square().sum(), list(net.parameters())), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert net(x).grad_fn is None


def test_frozen_layers_are_left_alone(net: Net) -> None:
    net.into.requires_grad_(False)
    fuse(net)
    assert type(net.into) is nn.Linear
    assert type(net.out).__name__ == "FusedLinear"


def test_only_the_given_parameters(net: Net) -> None:
    """Others that are trained elsewhere get no gradient, and cost no pass."""
    fuse(net)
    x = seeded(N, 5, 6)
    y = net(x)
    found = reward_gradients(y[:, 0], None, columns(5), [net.twice.weight], method="fused")
    y = net(x)
    expected = reward_gradients(y[:, 0], None, columns(5), [net.twice.weight], method="passes")
    assert_same(found, expected)
    assert found.by_passes == ()
    assert all(p.grad is None for p in net.parameters())


# What fused layers cannot serve costs passes, and is named


class Awkward(nn.Module):
    """A convolution, a leading dimension that is not the sample, and a weight that is also used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(6, 8, 3, padding=1)
        self.sequence_first = nn.Linear(8, 8)
        self.by_hand = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.convolution(x.transpose(1, 2)).transpose(1, 2))
        hidden = torch.tanh(self.sequence_first(hidden.transpose(0, 1)).transpose(0, 1))
        hidden = torch.tanh(self.by_hand(hidden) + hidden @ self.by_hand.weight)
        y: Tensor = self.out(hidden).mean(1)
        return y


def test_what_cannot_be_served_is_named_and_right() -> None:
    torch.manual_seed(0)
    model = Awkward()
    x = seeded(N, 5, 6)
    expected = gradients(model, x, columns(5), "passes")
    fuse(model)
    found = gradients(model, x, columns(5), "fused")
    names = [name for name, _ in model.named_parameters()]
    assert {names[i] for i in found.by_passes} == {
        "convolution.weight",
        "convolution.bias",
        "sequence_first.weight",
        "sequence_first.bias",
        "by_hand.weight",
    }
    assert_same(found, expected)


class SamplesSecond(nn.Module):
    """A sequence as long as the batch: the leading dimension looks like the sample, and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(6, 8)
        self.bad = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bad(torch.tanh(self.good(x)).transpose(0, 1)).mean(0)
        return y


def test_samples_in_the_wrong_dimension_are_noticed() -> None:
    torch.manual_seed(0)
    model = SamplesSecond()
    fuse(model)
    params = list(model.parameters())
    y = model(seeded(N, N, 6))
    with pytest.raises(FusedMismatch, match=r"params\[2\].*leading dimension.*passes"):
        GradientAccumulator(5, params, verified=set()).add(y[:, 0], y[:, 1], columns(5))
    y = model(seeded(N, N + 1, 6))
    checked = GradientAccumulator(5, params, verified=set())
    checked.add(y[:, 0], y[:, 1], columns(5))
    assert checked.finish().by_passes == (2, 3)


def test_every_size_of_micro_batch_is_checked_once() -> None:
    """A layer that is led by N tokens looks like one led by samples only where there are N of them."""
    torch.manual_seed(0)
    model = SamplesSecond()
    fuse(model)
    verified: set[int] = set()

    def add(accumulator: GradientAccumulator, samples: int) -> int:
        backward: list[int] = []
        y = model(seeded(samples, N, 6, seed=samples))
        y.register_hook(lambda gradient: backward.append(1))
        accumulator.add(y[:, 0], None, columns(5)[:samples])
        return len(backward)

    fewer = GradientAccumulator(5, list(model.parameters()), verified=verified)
    assert add(fewer, N - 2) == add(fewer, N - 2) + 1, "one more pass, the first time"
    another = GradientAccumulator(5, list(model.parameters()), verified=verified)
    add(another, N - 2)
    add(another, N - 3)
    assert verified == {N - 2, N - 3}
    with pytest.raises(FusedMismatch, match=r"params\[2\]"):
        add(another, N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_rounding_may_do_depends_on_the_numbers(net: Net, dtype: torch.dtype) -> None:
    """A tenth of a gradient, as between two passes through many layers; samples mixed up are never let through."""
    fuse(net)
    noise = torch.Generator().manual_seed(0)
    y = net(seeded(N, 5, 6))
    y.register_hook(lambda gradient: gradient * (1 + 0.15 * torch.randn(gradient.shape, generator=noise)))
    accumulator = GradientAccumulator(5, list(net.parameters()), verified=set(), computed_in=dtype)
    with pytest.raises(FusedMismatch) if dtype == torch.float32 else nullcontext():
        accumulator.add(y[:, 0], None, columns(5))
    torch.manual_seed(0)
    mixed = SamplesSecond()
    fuse(mixed)
    y = mixed(seeded(N, N, 6))
    with pytest.raises(FusedMismatch):
        GradientAccumulator(5, list(mixed.parameters()), verified=set(), computed_in=dtype).add(
            y[:, 0], None, columns(5)
        )


def test_in_lockstep_a_mismatch_waits_for_the_exchange() -> None:
    """A process that left in the middle of its passes would leave the others waiting in theirs."""
    torch.manual_seed(0)
    model = SamplesSecond()
    fuse(model)
    accumulator = GradientAccumulator(5, list(model.parameters()), verified=set(), lockstep=True)
    for seed in (0, 1):
        y = model(seeded(N, N, 6, seed=seed))
        accumulator.add(y[:, 0], y[:, 1], columns(5))
    with pytest.raises(FusedMismatch, match=r"params\[2\]"):
        accumulator.sum_over(World(), torch.zeros(1))


class Shared(nn.Module):
    """A vector that belongs to no sample goes through a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Linear(6, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.vector(torch.ones(6)) * x.mean(1).sum(1, keepdim=True)))
        return y


def test_a_layer_of_a_single_vector_is_done_by_passes() -> None:
    torch.manual_seed(0)
    model = Shared()
    x = seeded(N, 5, 6)
    expected = gradients(model, x, columns(5), "passes")
    fuse(model)
    found = gradients(model, x, columns(5), "fused")
    assert found.by_passes == (0, 1)
    assert_same(found, expected)


def test_without_fuse_all_is_done_by_passes(net: Net) -> None:
    x = seeded(N, 5, 6)
    found = gradients(net, x, columns(5), "fused")
    assert len(found.by_passes) == len(list(net.parameters()))
    assert_same(found, gradients(net, x, columns(5), "passes"))


def test_a_failing_backward_pass_leaves_nothing_behind(net: Net) -> None:
    fuse(net)
    x = seeded(N, 5, 6)
    y = net(x)
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reward_gradients(y[:, 0], None, columns(5), list(net.parameters()), method="fused")
    assert fused_module._active_sums is None
    assert_same(gradients(net, x, columns(5), "fused"), gradients(net, x, columns(5), "passes"))


# LoRA on an SD3 transformer


def adapted(folder: Path, **lora: Any) -> SD3Model:
    model = load_model(str(folder), torch.device("cpu"), 16)
    assert isinstance(model, SD3Model)
    torch.manual_seed(1)
    model.transformer.add_adapter(
        LoraConfig(r=4, lora_alpha=8, target_modules=model.lora_targets, init_lora_weights=False, **lora)
    )
    model.transformer.train()
    return model


def sd3_gradients(
    model: SD3Model, advantages: Tensor, method: Any, sizes: tuple[int, ...] = (N,), autocast: bool = False
) -> RewardGradients:
    """Over micro-batches of the given sizes, with the same dropout masks every time."""
    params = [p for p in model.transformer.parameters() if p.requires_grad]
    accumulator = GradientAccumulator(advantages.shape[1], params, method)
    x = seeded(N, *model.latent_shape(None, None), seed=3)
    sigma = torch.linspace(0.1, 0.9, N)
    conditioning = model.encode([f"prompt {i}" for i in range(N)])
    torch.manual_seed(5)
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            v = model.velocity(x[rows], sigma[rows], conditioning.rows(rows)).float()
        slope, base = v.flatten(1).mean(1), (v**2).flatten(1).mean(1)
        accumulator.add(slope, base, advantages[rows], torch.arange(N)[rows] // (N // 2))
    return accumulator.finish()


@pytest.fixture
def plain(tiny_sd3: Path) -> SD3Model:
    return adapted(tiny_sd3)


@pytest.mark.parametrize("count", [1, 5, pytest.param(50, marks=pytest.mark.full)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_lora_on_sd3(tiny_sd3: Path, count: int, checkpointing: bool, dropout: float) -> None:
    model = adapted(tiny_sd3, lora_dropout=dropout)
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()
    sizes = (3, 1, 4)
    expected = sd3_gradients(model, columns(count), "passes", sizes)
    fuse(model.transformer)
    found = sd3_gradients(model, columns(count), "fused", sizes)
    assert found.by_passes == ()
    assert_same(found, expected)


def test_micro_batches_change_nothing(plain: SD3Model) -> None:
    fuse(plain.transformer)
    whole = sd3_gradients(plain, columns(5), "fused")
    assert_same(sd3_gradients(plain, columns(5), "fused", (1, 5, 2)), whole)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast(plain: SD3Model, checkpointing: bool) -> None:
    """About as near to fp32 as separate passes under autocast are, which round sums over samples, not each sample."""
    if checkpointing:
        plain.transformer.enable_gradient_checkpointing()
    exact = sd3_gradients(plain, columns(5), "passes")
    rounded = sd3_gradients(plain, columns(5), "passes", autocast=True)
    fuse(plain.transformer)
    found = sd3_gradients(plain, columns(5), "fused", autocast=True)
    assert found.by_passes == ()
    for row, other, wanted in zip(found.g, rounded.g, exact.g, strict=True):
        assert (row - wanted).norm() <= 1.6 * (other - wanted).norm() + 1e-6
        assert (row - wanted).norm() <= 0.05 * wanted.norm()


def test_doras_magnitudes_are_done_by_passes(tiny_sd3: Path) -> None:
    model = adapted(tiny_sd3, use_dora=True)
    expected = sd3_gradients(model, columns(5), "passes")
    fuse(model.transformer)
    found = sd3_gradients(model, columns(5), "fused")
    names = [name for name, p in model.transformer.named_parameters() if p.requires_grad]
    assert [names[i] for i in found.by_passes] == [name for name in names if "magnitude" in name] != []
    assert_same(found, expected)
