"""`harmonizer.backward` in loops that are not ours: what it leaves in ``.grad``."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from marble_rl import AffineLoss, FairHarmonizer, Harmonizer, fuse

NAMES = ["a", "b", "c"]
RULES = ["marble", "fair"]
TARGETS = (-1.0, 0.3, 2.0)
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
ADVANTAGES = torch.randn(24, 3, generator=torch.Generator().manual_seed(2))


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def output(model: nn.Module, rows: slice = slice(None)) -> Tensor:
    found: Tensor = model(X[rows].to(next(model.parameters()).dtype)).squeeze(1)
    return found


def losses_of(model: nn.Module, rows: slice = slice(None)) -> list[Tensor]:
    """Not affine in anything, and of different sizes."""
    y = output(model, rows)
    return [(y - target).abs().pow(1.5).mean() * scale for target, scale in zip(TARGETS, (1, 10, 0.1), strict=True)]


def flat(model: nn.Module) -> Tensor:
    grads = [p.grad for p in model.parameters()]
    assert all(g is not None for g in grads)
    return torch.cat([g.flatten() for g in grads if g is not None])


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    params = list(model.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, retain_graph=True)])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_one_loss_is_plain_backward_bit_for_bit(rule: str, dtype: torch.dtype) -> None:
    plain, ours = network(dtype), network(dtype)
    harmonizer = Harmonizer(["a"], rule=rule)
    for _ in range(3):  # gradients add up, as with plain backward
        losses_of(plain)[1].backward()
        assert harmonizer.backward([losses_of(ours)[1]], ours.parameters()).tolist() == [1.0]
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert q.grad.dtype == dtype
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("rule", RULES)
def test_the_gradient_is_the_weighted_sum_of_the_gradients(rule: str) -> None:
    """In refreshes, and in MARBLE's steps between them, whose coefficients are alpha_bar."""
    model = network()
    by_hand = FairHarmonizer(NAMES) if rule == "fair" else Harmonizer(NAMES, refresh_every=2)
    harmonizer = Harmonizer(NAMES, rule=rule) if rule == "fair" else Harmonizer(NAMES, rule=rule, refresh_every=2)
    for step in range(4):
        g = torch.stack([gradient(model, loss) for loss in losses_of(model)])
        if isinstance(by_hand, FairHarmonizer):
            expected = by_hand.update(g).weights
        elif by_hand.should_refresh(step):
            expected = by_hand.refresh(g @ g.T).weights
        else:
            expected = by_hand.alpha_bar
        weights = harmonizer.backward(dict(zip(NAMES, losses_of(model), strict=True)), model.parameters())
        close(weights, expected)
        close(flat(model), expected @ g)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", ["scalars", "through", "affine"])
@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_are_the_whole_batch(rule: str, form: str, fused: bool) -> None:
    whole, pieces = network(), network()
    first, second = (Harmonizer(NAMES, rule=rule) for _ in range(2))
    if fused:
        fuse(whole)
        fuse(pieces)

    def add(harmonizer: Harmonizer, model: nn.Module, rows: slice, share: float, last: bool) -> Tensor | None:
        y = output(model, rows)
        if form == "affine":
            loss = AffineLoss(base=y.square(), slope=y.sin())
            return harmonizer.backward(loss, model.parameters(), ADVANTAGES[rows], last=last)
        losses = [share * (a * y.sin() + y.square()).mean() for a in ADVANTAGES[rows].T.to(y)]
        through = y if form == "through" else None
        kl = share * output(model, rows).pow(4).mean()
        return harmonizer.backward(losses, model.parameters(), shared=kl, through=through, last=last)

    for _ in range(2):  # a refresh, then a step between refreshes
        add(first, whole, slice(None), 1.0, True)
        assert add(second, pieces, slice(0, 16), 2 / 3, False) is None
        add(second, pieces, slice(16, 24), 1 / 3, True)
    close(flat(pieces), flat(whole))


def test_the_chain_rule_through_log_probabilities_gives_the_same_with_one_pass() -> None:
    """Clipped ratios, fused and not."""
    plain, fused = network(), network()
    fuse(fused)
    weights = []
    for model in (plain, fused):
        log_prob = output(model)
        ratio = (3 * log_prob).exp()[:, None]
        a = ADVANTAGES.to(ratio)
        losses = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean(0)
        through = log_prob if model is fused else None
        weights.append(Harmonizer(NAMES).backward(losses, model.parameters(), through=through))
    close(*weights)
    close(flat(fused), flat(plain))


def test_a_loss_that_goes_around_through_is_refused() -> None:
    model = network()
    y = output(model)
    hidden = [(y - t).square().mean() + 0.0 * output(model).mean() for t in TARGETS]  # zero now, not for ever
    with pytest.raises(ValueError, match="as `shared`"):
        Harmonizer(NAMES).backward(hidden, model.parameters(), through=y)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_in_grad_stays_and_parameters_without_a_gradient_keep_none(rule: str) -> None:
    model = network()
    params = [*model.parameters(), unused := nn.Parameter(torch.ones(2)), frozen := nn.Parameter(torch.ones(1))]
    frozen.requires_grad_(False)
    Harmonizer(NAMES, rule=rule).backward(losses_of(model), params)
    alone = flat(model)
    assert unused.grad is None  # AdamW decays the weights of parameters whose gradient is zero
    assert frozen.grad is None

    again = network()
    output(again).pow(4).mean().backward()
    before = flat(again)
    Harmonizer(NAMES, rule=rule).backward(losses_of(again), again.parameters())
    close(flat(again), before + alone)


@pytest.mark.parametrize("rule", RULES)
def test_a_constant_loss_does_not_hold_up_the_others(rule: str) -> None:
    model = network()
    a, b, _ = losses_of(model)
    Harmonizer(NAMES, rule=rule).backward([a, b, torch.tensor(0.0)], model.parameters())
    two = network()
    Harmonizer(NAMES[:2], rule=rule).backward(losses_of(two)[:2], two.parameters())
    close(flat(model), flat(two))


def test_parameters_of_several_dtypes() -> None:
    model = network(torch.float32)
    model[0].to(torch.bfloat16)
    y = model[2](torch.tanh(model[0](X.bfloat16()).float())).squeeze(1)
    Harmonizer(NAMES).backward([(y - t).square().mean() for t in TARGETS], model.parameters())
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == [p.dtype for p in model.parameters()]


@pytest.mark.parametrize("rule", RULES)
def test_an_overflow_reaches_grad_and_is_not_remembered(rule: str) -> None:
    model = network(torch.float32)
    harmonizer = Harmonizer(NAMES, rule=rule)
    harmonizer.backward([loss * float("inf") for loss in losses_of(model)], model.parameters())
    assert not torch.isfinite(flat(model)).all()
    for p in model.parameters():
        p.grad = None
    if rule == "marble":
        harmonizer.refresh_every = 1
    harmonizer.backward(losses_of(model), model.parameters())
    assert torch.isfinite(flat(model)).all()


def test_a_restored_harmonizer_goes_on_where_it_was() -> None:
    model = network()
    harmonizer = Harmonizer(NAMES, refresh_every=3)
    harmonizer.backward(losses_of(model), model.parameters())
    restored = Harmonizer(NAMES, refresh_every=3)
    restored.load_state_dict(copy.deepcopy(harmonizer.state_dict()))
    for _ in range(3):
        one = harmonizer.backward(losses_of(model), model.parameters())
        other = restored.backward(losses_of(model), model.parameters())
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", RULES)
def test_what_cannot_be_balanced_is_refused_and_leaves_nothing_behind(rule: str) -> None:
    model = network()
    params = list(model.parameters())
    harmonizer = Harmonizer(NAMES, rule=rule)
    good = losses_of(model)
    for losses, said in [
        (good[:2], "losses must be 3"),
        ({"a": good[0], "b": good[1], "d": good[2]}, "got .*'d'"),
        ([good[0], good[1], output(model)], "the loss of c must be one number"),
        ([loss.detach() for loss in good], "no_grad"),
        (AffineLoss(output(model), output(model)), r"advantages must be \[24, 3\]"),
    ]:
        with pytest.raises(ValueError, match=said):
            harmonizer.backward(losses, params)
    with pytest.raises(ValueError, match="depends on any of params"):
        harmonizer.backward(good, [nn.Parameter(torch.ones(2))])
    assert all(p.grad is None for p in params)
    fresh = network()
    harmonizer.backward(losses_of(model), params)
    Harmonizer(NAMES, rule=rule).backward(losses_of(fresh), fresh.parameters())
    assert torch.equal(flat(model), flat(fresh))
    with pytest.raises(ValueError, match="'marble' or 'fair'"):
        Harmonizer(NAMES, rule="nash")


TWO_RANKS = """
import sys, torch
from accelerate import Accelerator
sys.path.insert(0, "tests/balancing")
from test_backward import NAMES, TARGETS, X, network, flat
from marble_rl import Harmonizer, fuse
torch.set_num_threads(1)
rule, out = sys.argv[1:]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
size, rank = accelerator.num_processes, accelerator.process_index
model = network()
fuse(model)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
harmonizer = Harmonizer(NAMES, rule=rule)
for step in range(4):
    for half in range(2):
        rows = X[half * 12 : half * 12 + 12].double()
        rows = rows[rank * 12 // size : (rank + 1) * 12 // size]
        with accelerator.accumulate(model):
            y = model(rows).squeeze(1)
            losses = [(y - t).square().mean() / 2 for t in TARGETS]
            harmonizer.backward(losses, model.parameters(), through=y, last=accelerator.sync_gradients)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
torch.save(weights, f"{out}-{size}-{rank}.pt")
"""


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_two_ranks_with_accelerate_and_micro_batches_train_like_one(rule: str, tmp_path: Path) -> None:
    """DistributedDataParallel around the model, whose hooks never run."""
    script = tmp_path / "loop.py"
    script.write_text(TWO_RANKS)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    for size in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--standalone"]
        command += [str(script), rule, str(tmp_path / "weights")]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    one, *two = (torch.load(tmp_path / f"weights-{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert torch.equal(*two)
    torch.testing.assert_close(two[0], one, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(one, torch.cat([p.detach().flatten() for p in network().parameters()]))
