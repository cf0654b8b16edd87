"""The three adapters, the solvers, and gradients of the real SD3 transformer against plain NFT."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file

from marble_rl.config import load_config
from marble_rl.config.run import EvaluationConfig
from marble_rl.devices import pick_device
from marble_rl.distributed.world import World
from marble_rl.errors import InputError, NonFinite
from marble_rl.evaluation.evaluate import evaluate
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.models import FAMILIES, check_model_path, check_model_settings, load_model
from marble_rl.models.base import PromptCache
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.models.pixels import to_uint8
from marble_rl.models.sd3 import SD3Conditioning, SD3Model
from marble_rl.models.settings import LoraConfig
from marble_rl.prompts import PromptSet, load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rewards.builtin.brightness import Brightness
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rollout.rollout import roll_out, sample, try_sample
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.rollout.solvers import solve_ode
from marble_rl.runs.inputs import check_inputs
from marble_rl.training.batch import training_batch
from marble_rl.training.policy_gradients import PolicyGradients
from marble_rl.types import Rollout
from reference import nft_losses
from stages import policy_gradients


@pytest.fixture
def model(tiny_sd3: Path) -> SD3Model:
    loaded = load_model(str(tiny_sd3), torch.device("cpu"), 16)
    assert isinstance(loaded, SD3Model)
    return loaded


@pytest.fixture
def policy(model: SD3Model) -> LoraPolicy:
    """Three adapters with different weights."""
    policy = LoraPolicy(model.transformer, LoraConfig(rank=2, alpha=8), model.lora_targets, seed=0)
    draw = torch.Generator().manual_seed(1)
    for adapter in ADAPTERS:
        tensors = policy.tensors(adapter)
        policy.load_tensors(adapter, {n: 0.3 * torch.randn(t.shape, generator=draw) for n, t in tensors.items()})
    return policy


@pytest.fixture
def inputs(model: SD3Model) -> tuple[torch.Tensor, torch.Tensor, object]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(2, 4, 8, 8, generator=draw), torch.tensor([0.3, 0.9]), model.encode(["a cup", "a hat"])


def test_a_pipeline_of_another_class_is_refused_with_those_that_are_supported(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    with pytest.raises(InputError, match="StableDiffusionXLPipeline is not supported") as refusal:
        check_model_path(str(tmp_path))
    assert set(FAMILIES) == {"StableDiffusion3Pipeline", "FluxPipeline", "QwenImagePipeline", "WanPipeline"}
    assert str(refusal.value).endswith(", ".join(FAMILIES))


def test_the_page_on_adding_a_model_knows_every_family_and_its_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    table = {row[0]: row[1:] for row in rows if len(row) == 1 + len(FAMILIES)}
    for column, (pipeline, adapter) in enumerate(FAMILIES.items()):
        module, _, name = adapter.partition(":")
        family = getattr(importlib.import_module(module), name)
        assert table["pipeline class"][column] == f"`{pipeline}`" == f"`{family.pipeline_class}`"
        tokens = next(cells for title, cells in table.items() if title.startswith("text tokens"))
        assert tokens[column].startswith(str(family.default_text))
        targets = table["LoRA targets"]
        spelt = targets[0] if targets[column].startswith("the same") else targets[column]
        assert re.findall("`(.*?)`", spelt) == list(family.lora_targets)
        assert table["samples"][column] == ("videos" if family.makes_videos else "images")


def test_settings_that_sd3_does_not_have_are_refused(tiny_sd3: Path, model: SD3Model) -> None:
    with pytest.raises(InputError, match=r"rollout\.frames: 9 given, but Stable Diffusion 3 makes images"):
        check_model_settings(str(tiny_sd3), frames=9)
    with pytest.raises(InputError, match=r"rollout\.frames: 9 given"):
        model.latent_shape(None, None, 9)
    for refused in (check_model_settings, lambda path, guidance: load_model(path, model.device, guidance=guidance)):
        with pytest.raises(InputError, match=r"model\.guidance: 3\.5 given, but Stable Diffusion 3 takes no guidance"):
            refused(str(tiny_sd3), guidance=3.5)
    with pytest.raises(InputError, match="width: 18 is not a multiple of 4"):
        model.latent_shape(16, 18)
    check_model_settings("owner/on-the-hub", guidance=3.5)  # not known before it is downloaded
    check_model_settings(str(tiny_sd3), text_length=512)


@pytest.mark.parametrize("setting", ["rollout.frames=5", "model.guidance=3.5", "model.text_length=600"])
def test_a_config_with_such_a_setting_is_refused_before_anything_is_loaded(config_file: Path, setting: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(setting.partition('=')[0])}: .*Stable Diffusion 3"):
        check_inputs(load_config(config_file, [setting]))


def test_a_model_folder_is_found_from_the_config_and_from_where_the_command_is_typed(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that stays relative passes for an id on the hub as soon as the run is opened from elsewhere."""
    typed_in = tmp_path / "elsewhere"
    for folder in (typed_in / "build" / "mine", typed_in / "build" / "both", config_file.parent / "build" / "both"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(typed_in)

    def path(given: str) -> str:
        return load_config(config_file, [f"model.path={given}"]).model.path

    assert path("build/mine") == str(typed_in / "build" / "mine")
    assert path("build/both") == str(config_file.parent / "build" / "both")
    assert path("owner/name") == "owner/name"
    assert path("mini") == "mini"


def test_a_size_can_shift_the_levels_of_sd3(model: SD3Model) -> None:
    """As the scheduler's own pipeline computes mu."""
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

    shift = {"base_image_seq_len": 4, "max_image_seq_len": 64, "base_shift": 0.5, "max_shift": 1.7}
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **shift)
    model.pipeline.scheduler.set_timesteps(5, mu=calculate_shift(4 * 8, *shift.values()))
    assert torch.equal(model.sigmas(5, (4, 8, 16)), model.pipeline.scheduler.sigmas)


def test_adapters_start_equal_and_leave_the_model_unchanged(model: SD3Model, inputs: tuple) -> None:
    before = model.velocity(*inputs)
    policy = LoraPolicy(model.transformer, LoraConfig(rank=2, alpha=8), model.lora_targets, seed=0)
    assert torch.equal(model.velocity(*inputs), before)
    for name, value in policy.tensors("default").items():
        assert torch.equal(value, policy.tensors("old")[name])
        assert torch.equal(value, policy.tensors("ema")[name])
        assert value.data_ptr() != policy.tensors("ema")[name].data_ptr()


def test_each_role_predicts_with_its_own_weights(model: SD3Model, policy: LoraPolicy, inputs: tuple) -> None:
    outputs = {}
    for role in (*ADAPTERS, "base"):
        with policy.acting_as(role):
            outputs[role] = model.velocity(*inputs)
            assert not outputs[role].requires_grad
    for a, b in [("default", "old"), ("old", "ema"), ("ema", "base")]:
        assert not torch.allclose(outputs[a], outputs[b])
    trained = model.velocity(*inputs)
    assert trained.requires_grad
    assert torch.equal(trained, outputs["default"])


def test_switching_adapters_between_forward_and_backward_loses_gradients(
    model: SD3Model, policy: LoraPolicy, inputs: tuple
) -> None:
    """The trap that the order of predictions avoids: v_ref and v_old first, v_theta last."""

    def loss() -> torch.Tensor:
        return model.velocity(*inputs).square().sum()

    expected = torch.autograd.grad(loss(), policy.parameters, allow_unused=True)
    assert sum(g is not None and bool(g.any()) for g in expected) >= 24

    switched_too_late = loss()
    with policy.acting_as("old"):
        switched_too_late.backward()
    assert all(p.grad is None for p in policy.parameters)

    for role in ("base", "old"):
        with policy.acting_as(role):
            model.velocity(*inputs)
    loss().backward()
    for parameter, gradient in zip(policy.parameters, expected, strict=True):
        assert gradient is parameter.grad is None or torch.equal(parameter.grad, gradient)


def test_only_the_trained_adapter_is_trainable(model: SD3Model, policy: LoraPolicy) -> None:
    trainable = {name for name, p in model.transformer.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.transformer.named_parameters() if ".default." in name}
    assert len(trainable) == len(policy.parameters)


def test_a_failed_role_restores_the_trained_one(model: SD3Model, policy: LoraPolicy, inputs: tuple) -> None:
    before = model.velocity(*inputs)
    with pytest.raises(KeyError), policy.acting_as("base"):
        raise KeyError
    assert torch.equal(model.velocity(*inputs), before)


def test_blend(policy: LoraPolicy) -> None:
    old = {name: value.clone() for name, value in policy.tensors("old").items()}
    policy.blend("old", "default", 0.25)
    for name, value in policy.tensors("old").items():
        torch.testing.assert_close(value, 0.25 * old[name] + 0.75 * policy.tensors("default")[name])
    policy.blend("old", "default", 0.0)
    for name, value in policy.tensors("old").items():
        assert torch.equal(value, policy.tensors("default")[name])


def test_sigmas_are_those_of_the_pipelines_scheduler(model: SD3Model) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(model.pipeline.scheduler.config)
    scheduler.set_timesteps(7)
    sigmas = model.sigmas(7, (4, 8, 8))
    assert torch.equal(sigmas, scheduler.sigmas)
    assert torch.equal(sigmas[:-1] * 1000, scheduler.timesteps)
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0


def straight_line(target: torch.Tensor):
    """The velocity field whose trajectories end in ``target``: v = (x - target) / sigma. Any solver is exact on it."""
    return lambda x, sigma: (x - target) / sigma.reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_solvers_are_exact_on_straight_lines(solver: str) -> None:
    draw = torch.Generator().manual_seed(0)
    noise, target = torch.randn(2, 1, 2, 4, 4, generator=draw)
    sigmas = torch.tensor([1.0, 0.83, 0.5, 0.21, 0.0])
    torch.testing.assert_close(solve_ode(straight_line(target), noise, sigmas, solver), target, atol=1e-5, rtol=0)


def curved(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """dx/dsigma = x cos(3 sigma): the solution is x(s) = x(1) exp((sin 3s - sin 3) / 3)."""
    return x * torch.cos(3 * sigma.reshape(-1, 1, 1, 1))


def dpm_plus_plus_2m(x: torch.Tensor, sigmas: list[float]) -> torch.Tensor:
    """DPM-Solver++(2M) for alpha = 1 - sigma, written from its update rule in float64."""
    previous = None
    for i, (s, t) in enumerate(itertools.pairwise(sigmas)):
        denoised = x - s * curved(x, torch.tensor([s], dtype=torch.float64))
        lam = [math.log((1 - u) / u) if 0 < u < 1 else math.inf * (1 if u == 0 else -1) for u in (s, t)]
        if previous is None or t == 0:  # first step, and the last one onto sigma = 0
            estimate = denoised
        else:
            before = sigmas[i - 1]
            ratio = ((lam[0] - math.log((1 - before) / before)) if before < 1 else math.inf) / (lam[1] - lam[0])
            estimate = denoised + (denoised - previous) / (2 * ratio)
        x = (t / s) * x - (1 - t) * (math.exp(lam[0] - lam[1]) - 1) * estimate
        previous = denoised
    return x


def test_dpm2_is_dpm_solver_plus_plus_2m() -> None:
    noise = torch.randn(1, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    sigmas = [1.0, 0.9, 0.75, 0.55, 0.3, 0.1, 0.0]
    ours = solve_ode(curved, noise, torch.tensor(sigmas), "dpm2")
    torch.testing.assert_close(ours.double(), dpm_plus_plus_2m(noise.double(), sigmas), atol=2e-6, rtol=0)


def test_euler_converges_at_first_order() -> None:
    noise = torch.ones(1, 1, 1, 1)
    exact = math.exp((math.sin(0.0) - math.sin(3.0)) / 3)
    errors = [
        abs(float(solve_ode(curved, noise, torch.linspace(1, 0, n + 1), "euler")) - exact) for n in (64, 128, 256)
    ]
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(2.0, rel=0.1)


def three_prompts() -> PromptSet:
    return load_prompts([PromptSourceConfig(name="a", texts=["a cup", "a hat", "a kite"])], "prompts")


def make_rollout(
    model: SD3Model, policy: LoraPolicy, solver: str = "dpm2", batch_size: int | None = None, **options: Any
) -> Rollout:
    config = RolloutConfig(groups=3, group_size=2, steps=4, solver=solver, batch_size=batch_size)
    groups = three_prompts().draw(0, 0, 3)
    return roll_out(model, policy, PromptCache(model), groups, config, seed=0, index=0, **options)


def test_training_sees_exactly_the_timesteps_that_were_sampled_with(
    model: SD3Model, policy: LoraPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    forward = model.transformer.forward
    monkeypatch.setattr(
        model.transformer, "forward", lambda **k: (seen.extend(k["timestep"].tolist()), forward(**k))[1]
    )
    rollout = make_rollout(model, policy)
    sampled = set(seen)
    assert len(sampled) == 4
    assert any(t != int(t) for t in sampled)
    seen.clear()
    batch = training_batch(rollout, 0, Nft(NftSettings(timestep_fraction=0.75)), seed=0, step=0)
    policy_gradients(model, policy, batch, torch.ones(6, 1), NftSettings(), per_column=False, micro_batch=4)
    assert set(seen) == set(sorted(sampled)[1:])


@pytest.mark.parametrize("at_once", [1, 3, 4, 100])
def test_a_batch_may_hold_part_of_a_group_or_several(model: SD3Model, policy: LoraPolicy, at_once: int) -> None:
    whole = make_rollout(model, policy)
    reported: list[torch.Tensor] = []
    other = make_rollout(model, policy, batch_size=at_once, on_group=reported.append)
    torch.testing.assert_close(other.x0, whole.x0, rtol=0, atol=1e-5)
    assert (other.images.int() - whole.images.int()).abs().max() <= 1
    assert [len(group) for group in reported] == [2, 2, 2]
    assert torch.equal(torch.cat(reported), other.images)


def test_rollout_is_seeded_and_follows_the_old_policy_alone(model: SD3Model, policy: LoraPolicy) -> None:
    first = make_rollout(model, policy)
    assert len(torch.unique(first.x0, dim=0)) == 6
    policy.blend("default", "ema", 0.0)
    assert torch.equal(make_rollout(model, policy).x0, first.x0)
    assert not torch.allclose(make_rollout(model, policy, "euler").x0, first.x0)
    policy.blend("old", "ema", 0.0)
    assert not torch.allclose(make_rollout(model, policy).x0, first.x0)


def test_policy_gradient_is_that_of_plain_nft(model: SD3Model, policy: LoraPolicy) -> None:
    """One backward pass over r L+ + (1 - r) L- and the KL term, written from the equations, on the same rows."""
    rollout = make_rollout(model, policy)
    config = NftSettings(beta=0.1, kl_weight=0.3)
    batch = training_batch(rollout, 0, Nft(config), seed=5, step=9)
    advantage = torch.tensor([1.5, -1.5, 0.2, 5.0, -5.0, 0.0])
    ours = policy_gradients(model, policy, batch, advantage[:, None], config, per_column=False, micro_batch=2)

    total, rows = torch.zeros(()), 0
    for level in range(batch.sigmas.shape[1]):
        everyone = torch.arange(6)
        sigma, x0 = batch.sigmas[:, level], batch.x0
        t = sigma.reshape(-1, 1, 1, 1)
        x_t = (1 - t) * x0 + t * batch.noise(everyone, level)
        conditioning = rollout.conditioning.rows(batch.slots)
        with policy.acting_as("base"):
            v_ref = model.velocity(x_t, sigma, conditioning)
        with policy.acting_as("old"):
            v_old = model.velocity(x_t, sigma, conditioning)
        v = model.velocity(x_t, sigma, conditioning)
        total = total + plain_nft(v, v_old, x0, x_t, t, advantage, 0.1).sum()
        total = total + 0.3 * ((v - v_ref) ** 2).mean((1, 2, 3)).sum()
        rows += 6
        expected = nft_losses(*(a.double() for a in (v.detach(), v_old, x0, x_t, sigma, advantage)), beta=0.1)
        torch.testing.assert_close(
            plain_nft(v, v_old, x0, x_t, t, advantage, 0.1).double(), torch.as_tensor(expected), rtol=1e-4, atol=1e-4
        )
    gradients = torch.autograd.grad(total / rows, policy.parameters)
    flat = torch.cat([g.flatten() for g in gradients])
    assert (ours.gradients.shared - flat).norm() / flat.norm() < 1e-6


def plain_nft(v, v_old, x0, x_t, t, advantage, beta, a_max=5.0):  # type: ignore[no-untyped-def]
    """[N], differentiable: DiffusionNFT's loss as its paper and code state it."""

    def error(velocity: torch.Tensor) -> torch.Tensor:
        difference = x_t - t * velocity - x0
        weight = difference.detach().abs().mean((1, 2, 3)).clamp(min=1e-5)
        return (difference**2).mean((1, 2, 3)) / weight

    r = (0.5 + advantage / (2 * a_max)).clamp(0, 1)
    positive, negative = error((1 - beta) * v_old + beta * v), error((1 + beta) * v_old - beta * v)
    return a_max / beta * (r * positive + (1 - r) * negative)


def test_per_reward_gradients_combine_to_the_single_pass(model: SD3Model, policy: LoraPolicy) -> None:
    """Proposition 1 on the real transformer: sum_k alpha_k g_k + shared is the gradient under A_bar."""
    rollout = make_rollout(model, policy)
    config = NftSettings()
    batch = training_batch(rollout, 0, Nft(config), seed=5, step=9)
    columns = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)).clamp(-5, 5)
    alpha = torch.tensor([0.2, 0.5, 0.3])
    apart = policy_gradients(model, policy, batch, columns, config, per_column=True, micro_batch=4).gradients
    together = policy_gradients(
        model, policy, batch, columns @ alpha[:, None], config, per_column=False, micro_batch=4
    ).gradients
    combined = alpha @ apart.g + apart.shared
    assert (combined - together.shared).norm() / together.shared.norm() < 1e-5
    assert apart.cross is not None


@pytest.mark.parametrize("per_column", [False, True])
def test_lazy_regularisation_is_the_full_one_on_average(model: SD3Model, policy: LoraPolicy, per_column: bool) -> None:
    """Every sample is taken in one of the m turns with m-fold weight: the mean over the turns is exact."""
    rollout = make_rollout(model, policy)
    columns = torch.randn(6, 3 if per_column else 1, generator=torch.Generator().manual_seed(3))

    def shared(every: int, turn: int, micro_batch: int = 2) -> torch.Tensor:
        config = NftSettings(kl_weight=0.3, regularize_every=every)
        batch = training_batch(rollout, 0, Nft(config), seed=5, step=9)
        in_turn = (torch.arange(6)[:, None] + torch.arange(batch.sigmas.shape[1]) + turn) % every == 0
        batch = dataclasses.replace(batch, regularized=in_turn)
        found = policy_gradients(model, policy, batch, columns, config, per_column=per_column, micro_batch=micro_batch)
        return found.gradients.shared

    lazy = [shared(3, turn) for turn in range(3)]
    full = shared(1, 0)
    assert not torch.allclose(lazy[0], full, rtol=1e-2)
    assert (torch.stack(lazy).mean(0) - full).norm() / full.norm() < 1e-5
    assert (shared(3, 0, micro_batch=5) - lazy[0]).norm() / full.norm() < 1e-5, "micro-batches do not matter"


def test_on_policy_the_old_prediction_is_not_computed(
    model: SD3Model, policy: LoraPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy.blend("old", "default", 0.0)
    assert policy.equal("old", "default")
    rollout = make_rollout(model, policy)
    config = NftSettings(kl_weight=0.0)
    batch = training_batch(rollout, 0, Nft(config), seed=5, step=9)
    columns = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))

    def found() -> tuple[PolicyGradients, int]:
        calls: list[int] = []
        forward = model.transformer.forward
        with monkeypatch.context() as patched:
            patched.setattr(model.transformer, "forward", lambda **k: (calls.append(1), forward(**k))[1])
            result = policy_gradients(model, policy, batch, columns, config, per_column=True, micro_batch=6)
        return result, len(calls)

    saved, few = found()
    monkeypatch.setattr(LoraPolicy, "equal", lambda *adapters: False)
    computed, many = found()
    assert many == 2 * few
    assert (saved.gradients.shared == 0).all()
    assert computed.gradients.shared.norm() < 1e-5 * computed.gradients.g.norm()
    assert (saved.gradients.g - computed.gradients.g).norm() < 1e-5 * computed.gradients.g.norm()


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize(("on_policy", "kl_weight", "every"), [(True, 0.0, 1), (True, 0.3, 2), (False, 0.3, 2)])
def test_samples_without_a_gradient_are_not_predicted(
    model: SD3Model,
    policy: LoraPolicy,
    monkeypatch: pytest.MonkeyPatch,
    per_column: bool,
    on_policy: bool,
    kl_weight: float,
    every: int,
) -> None:
    """A group that all its rewards score alike: the gradients are those of all samples."""
    if on_policy:
        policy.blend("old", "default", 0.0)
    rollout = make_rollout(model, policy)
    config = NftSettings(kl_weight=kl_weight, regularize_every=every)
    batch = training_batch(rollout, 0, Nft(config), seed=5, step=9)
    columns = torch.randn(6, 3 if per_column else 1, generator=torch.Generator().manual_seed(3))
    columns[batch.groups == 1] = 0.0
    predicted: list[int] = []
    predict = SD3Model.predict

    def counted(self: SD3Model, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        predicted.append(len(x) * torch.is_grad_enabled())
        return predict(self, x, *rest)

    monkeypatch.setattr(SD3Model, "predict", counted)

    def found(world: World | None = None) -> tuple[PolicyGradients, int]:
        predicted.clear()
        given = {"per_column": per_column, "micro_batch": 2, "world": world}
        return policy_gradients(model, policy, batch, columns, config, **given), sum(predicted)

    fewer, rows = found()
    lockstep = World()
    lockstep.lockstep = True
    whole, every_row = found(lockstep)
    levels = batch.sigmas.shape[1]
    assert every_row == 6 * levels
    skipped = batch.groups == 1
    wanted = int(batch.regularized[skipped].sum()) if kl_weight > 0 else 0
    assert rows == (every_row if not on_policy and not per_column else 4 * levels + wanted)
    for ours, theirs in ((fewer.gradients.g, whole.gradients.g), (fewer.gradients.shared, whole.gradients.shared)):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    torch.testing.assert_close(fewer.gradients.gram, whole.gradients.gram, rtol=1e-5, atol=0)
    assert fewer.kl == pytest.approx(whole.kl)
    assert fewer.base > 0
    assert fewer.slopes.tolist() == pytest.approx(whole.slopes.tolist(), rel=1e-5, abs=1e-6)


def test_a_batch_without_any_gradient(model: SD3Model, policy: LoraPolicy) -> None:
    policy.blend("old", "default", 0.0)
    batch = training_batch(make_rollout(model, policy), 0, Nft(NftSettings(kl_weight=0.0)), seed=5, step=9)
    nothing = policy_gradients(
        model, policy, batch, torch.zeros(6, 3), NftSettings(kl_weight=0.0), per_column=True, micro_batch=2
    )
    assert not nothing.gradients.g.any()
    assert not nothing.gradients.gram.any()
    assert nothing.is_finite


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("kl_weight", "every"), [(0.0, 1), (0.3, 2)])
def test_a_pass_is_forgotten_before_the_next_one_begins(
    model: SD3Model,
    policy: LoraPolicy,
    monkeypatch: pytest.MonkeyPatch,
    kl_weight: float,
    every: int,
    checkpointing: bool,
) -> None:
    """Also where nothing but the slopes is differentiated, so that no pass is known to be the last."""
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()
    policy.blend("old", "default", 0.0)
    rollout = make_rollout(model, policy)
    config = NftSettings(kl_weight=kl_weight, regularize_every=every)
    batch = training_batch(rollout, 0, Nft(config), seed=5, step=9)
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach()  # which lives as long as the graph
        kept.append(weakref.ref(copy))
        return copy

    velocity = model.velocity

    def watched(*inputs: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in kept))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return velocity(*inputs)

    monkeypatch.setattr(model, "velocity", watched)
    columns = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    policy_gradients(model, policy, batch, columns, config, per_column=True, micro_batch=2)
    assert len(kept) > len(alive) > 2
    assert set(alive) == {0}


def test_prompts_are_encoded_once_and_the_oldest_forgotten(model: SD3Model, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda texts: (encoded.extend(texts), encode(texts))[1])
    one = encode(["a cup"])
    cache = PromptCache(model, limit=2 * one.bytes)
    both = cache.encode(["a cup", "a hat", "a cup"])
    assert encoded == ["a cup", "a hat"]
    assert isinstance(both, SD3Conditioning)
    for row in (0, 2):
        assert torch.equal(both.prompt_embeds[row], one.prompt_embeds[0])
        assert torch.equal(both.pooled[row], one.pooled[0])
    cache.encode(["a cup"])
    cache.encode(["a kite"])  # the hat was unused for longest
    cache.encode(["a cup", "a kite"])
    assert encoded == ["a cup", "a hat", "a kite"]
    cache.encode(["a hat"])
    assert encoded[-1] == "a hat"
    many = cache.encode(["one", "two", "three", "four"])  # more than it can keep
    assert many.bytes == 4 * one.bytes


def test_text_encoders_visit_the_device_only_to_encode(model: SD3Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from where they are sent: there is no second device here."""
    moves: list[str] = []
    some = model.encode(["a cup"])
    monkeypatch.setattr(model, "encode", lambda texts: (moves.append("encode"), some)[1])
    for encoder in model.text_encoders:
        monkeypatch.setattr(encoder, "to", lambda device: moves.append(str(device)))
    cache = PromptCache(model)
    cache.encode(["a cup"])
    assert moves == ["encode"]
    moves.clear()
    monkeypatch.setattr(model, "device", torch.device("meta"))
    cache.encode(["a hat", "a cup"])
    cache.encode(["a hat", "a cup"])
    assert moves == ["meta"] * 3 + ["encode"] + ["cpu"] * 3


def test_what_is_prepared_is_what_comes_first(model: SD3Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what comes last is known already, from a walk over the same prompts: else every batch is a visit."""
    texts = [f"prompt {i}" for i in range(6)]
    encode, encoded = model.encode, list[str]()
    cache = PromptCache(model, limit=3 * encode(texts[:1]).bytes)
    for text in texts:
        cache.encode([text])
    monkeypatch.setattr(model, "encode", lambda given: (encoded.extend(given), encode(given))[1])
    cache.prepare(texts)
    assert encoded[:3] == texts[:3]
    encoded.clear()
    for text in texts[:3]:
        cache.encode([text])
    assert encoded == []


def test_prompts_prepared_in_one_visit_are_those_encoded_on_demand(
    model: SD3Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a cup", "a hat", "a kite", "an ox"]
    wanted = [PromptCache(model).encode([text]) for text in texts]
    events: list[str] = []
    encode, visit = model.encode, model.encoding
    monkeypatch.setattr(model, "encode", lambda given: (events.extend(given), encode(given))[1])
    monkeypatch.setattr(model, "encoding", lambda: (events.append("visit"), visit())[1])
    cache = PromptCache(model)
    cache.encode(["a hat"])
    events.clear()
    cache.prepare([*texts, "a cup"])
    cache.prepare(texts)
    assert events == ["visit", "a cup", "a kite", "an ox"]
    for text, expected in zip(texts, wanted, strict=True):
        found = cache.encode([text])
        assert isinstance(found, SD3Conditioning)
        assert isinstance(expected, SD3Conditioning)
        assert torch.equal(found.prompt_embeds, expected.prompt_embeds)
        assert torch.equal(found.pooled, expected.pooled)
    assert len(events) == 4

    # Of more than it can keep, the first: they are asked for first, and must not be forgotten for the others.
    small = PromptCache(model, limit=2 * wanted[0].bytes)
    small.prepare(texts)
    events.clear()
    small.encode(texts[:2])
    assert events == []
    small.encode(texts[2:])
    assert events == ["visit", "a kite", "an ox"]


def test_diverged_latents_are_an_error(model: SD3Model, policy: LoraPolicy) -> None:
    policy.load_tensors("old", {n: torch.full_like(t, float("nan")) for n, t in policy.tensors("old").items()})
    with pytest.raises(NonFinite, match="latents that are not finite"):
        make_rollout(model, policy)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_no_numbers_are_an_error(value: float) -> None:
    pixels = torch.zeros(2, 3, 4, 4)
    assert to_uint8(pixels).unique().tolist() == [128]
    pixels[1, 2, 3, 0] = value
    with pytest.raises(NonFinite, match=r"model\.vae_dtype: float32"):
        to_uint8(pixels)


def second_decode_overflows(model: SD3Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three decodes; returns the list that every forward pass is noted in."""
    passes: list[int] = []
    velocity, decode = model.velocity, model.pipeline.vae.decode
    monkeypatch.setattr(model, "velocity", lambda *inputs: (passes.append(1), velocity(*inputs))[1])
    overflows = iter([1.0, math.inf, 1.0])
    monkeypatch.setattr(model.pipeline.vae, "decode", lambda *a, **k: (decode(*a, **k)[0] * next(overflows),))
    return passes


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_autoencoder_that_overflows_stops_the_rollout(
    model: SD3Model, policy: LoraPolicy, monkeypatch: pytest.MonkeyPatch, lockstep: bool
) -> None:
    """In lockstep after the passes that the other ranks wait for; no reward sees such images."""
    passes, seen = second_decode_overflows(model, monkeypatch), []
    with pytest.raises(NonFinite, match=r"pixels that are not finite.*model\.vae_dtype: float32"):
        make_rollout(model, policy, lockstep=lockstep, on_group=seen.append)
    assert len(seen) == 1
    assert len(passes) == 4 * (3 if lockstep else 2)


@pytest.mark.parametrize("lockstep", [False, True])
def test_an_autoencoder_that_overflows_stops_the_evaluation(
    model: SD3Model, monkeypatch: pytest.MonkeyPatch, lockstep: bool
) -> None:
    """As in a rollout: in lockstep after the passes that the other ranks wait for."""
    passes, seen = second_decode_overflows(model, monkeypatch), []
    monkeypatch.setattr(World, "lockstep", lockstep)
    scorer = Scorer([RewardConfig(type="brightness", name="bright")], {"bright": Brightness()})
    scorer.load(torch.device("cpu"))
    settings = EvaluationConfig(steps=4, batch_size=1)
    with pytest.raises(NonFinite, match=r"pixels that are not finite.*model\.vae_dtype: float32"):
        evaluate(model, PromptCache(model), scorer, three_prompts(), settings, RolloutConfig(), on_images=seen.append)
    assert seen == [1]
    assert len(passes) == 4 * (3 if lockstep else 2)


def test_drawing_hands_back_what_sampling_raises(model: SD3Model, policy: LoraPolicy) -> None:
    with torch.no_grad():
        model.pipeline.vae.decoder.conv_out.bias.fill_(math.nan)
    inputs = torch.randn(2, 4, 8, 8), model.encode(["a cup", "a hat"]), model.sigmas(2, (4, 8, 8)), "euler"
    drawn = try_sample(model, *inputs)
    assert drawn.latents.isfinite().all()
    assert drawn.images.shape == (2, 16, 16, 3)
    assert "model.vae_dtype" in str(drawn.failure)
    with pytest.raises(NonFinite, match=r"model\.vae_dtype"):
        sample(model, *inputs)


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--device: unknown device 'meta'; use auto, cpu, cuda or cuda:N"):
        pick_device("meta", "--device")
    with pytest.raises(InputError, match=r"--device: 'mps' given, but torch finds the CPU only"):
        pick_device("mps", "--device")
    assert pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert pick_device("auto") == torch.device("xpu")
    assert pick_device("xpu:1") == torch.device("xpu:1")
    with pytest.raises(InputError, match=r"model\.device: 'xpu:2' given, but this machine has 2 of xpu"):
        pick_device("xpu:2")
    with pytest.raises(InputError, match=r"model\.device: 'cuda' given, but torch finds the CPU and xpu"):
        pick_device("cuda")


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_3"])
def test_a_part_that_lacks_weights_is_refused(part: str, tiny_sd3: Path, tmp_path: Path) -> None:
    """diffusers and transformers would fill them in with random numbers."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_sd3, folder)
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    lost = sorted(tensors)[len(tensors) // 2]
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"model\.path: .*'{part}' lack 1 tensor, the first is {re.escape(lost)}"):
        load_model(str(folder), torch.device("cpu"), 16)
