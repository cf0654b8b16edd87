"""What a run computes with, what it saves memory by, and what it does when numbers or memory give out."""

from __future__ import annotations

import dataclasses
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import families
from marble_rl.config import load_config
from marble_rl.distributed.world import World
from marble_rl.errors import InputError, OutOfMemory, RewardFailed
from marble_rl.gradients.accumulate import GradientAccumulator
from marble_rl.losses.settings import LossConfig
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.memory.out_of_memory import memory_errors
from marble_rl.models import check_quantization, load_model
from marble_rl.models.base import PromptCache
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.models.precision import MemorySettings, memory_settings
from marble_rl.models.sd3 import SD3Model
from marble_rl.models.settings import ModelConfig
from marble_rl.models.tiny import BUILDERS
from marble_rl.prompts import load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rollout.rollout import roll_out
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.runs.checkpoint import load_newest
from marble_rl.runs.inputs import check_inputs
from marble_rl.training.batch import training_batch
from marble_rl.training.experience import ExperienceSource
from marble_rl.training.policy_gradients import PolicyGradients, policy_gradients
from marble_rl.training.precision import LossScale
from marble_rl.training.trainer import Trainer
from marble_rl.types import Rollout
from runs import lora_bytes, marble, metrics, train, write_config

CPU = torch.device("cpu")
HALF = 2.0**-8
"""Relative rounding of bfloat16; that of float16 is smaller."""
SMALL = ("--set", "rollout.groups=2", "--set", "rollout.group_size=2")
"""For tests of what happens from step to step, whatever a step computes."""


# Numbers


def trained_on(folder: Path, memory: MemorySettings, scale: float = 1.0) -> tuple[Any, Rollout, LoraPolicy, Any]:
    """A model with three different adapters, a rollout of it, and the function that gives its gradients."""
    model: Any = load_model(str(folder), CPU, 16, memory=memory)
    policy = families.adapted(model)
    prompts = load_prompts([PromptSourceConfig(name="a", texts=[*families.PROMPTS, "a kite", "an ox"])], "prompts")
    frames = {"frames": 5} if model.makes_videos else {}
    config = RolloutConfig(groups=4, group_size=2, steps=3, height=16, width=32, **frames)
    rollout = roll_out(model, policy, PromptCache(model), prompts.draw(0, 0, 4), config, seed=0, index=0)
    batch = training_batch(rollout, 0, LossConfig(timesteps_per_sample=1), seed=5, step=9)
    columns = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))

    def gradients(method: Any = "fused", x0: Tensor | None = None) -> PolicyGradients:
        given = batch if x0 is None else dataclasses.replace(batch, x0=x0)
        settings = {"per_column": True, "micro_batch": 3, "method": method, "verify": method == "fused"}
        return policy_gradients(model, policy, given, columns, LossConfig(kl_weight=0.1), **settings, scale=scale)

    return model, rollout, policy, gradients


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", list(BUILDERS))
def test_half_precision_is_float32_but_for_its_rounding(family: str, tmp_path: Path) -> None:
    BUILDERS[family](tmp_path)
    _, plain, _, exact = trained_on(tmp_path, MemorySettings())
    wanted = exact()
    # diffusers rounds 1000 sigma for FLUX to bfloat16, by up to 2: plain samples in bfloat16 have that, too.
    bound = (64 if family == "flux" else 16) * HALF
    dtypes = [torch.bfloat16, torch.float16] if family == "sd3" else [torch.bfloat16]
    for dtype in dtypes:
        memory = MemorySettings(dtype=dtype, vae_dtype=torch.bfloat16, gradient_checkpointing=True)
        model, rollout, policy, gradients = trained_on(tmp_path, memory, 1.0 if dtype == torch.bfloat16 else 2.0**16)
        assert model.transformer.dtype == dtype
        assert {parameter.dtype for parameter in policy.parameters} == {torch.float32}
        assert rollout.x0.dtype == torch.float32
        assert 0 < off(rollout.x0, plain.x0) < 8 * HALF
        assert off(rollout.images.float(), plain.images.float()) < 16 * HALF
        # The same latents, so that only the precision of the gradients differs.
        found = gradients(x0=plain.x0)
        for part in ("g", "shared", "gram", "norms"):
            assert off(getattr(found.gradients, part), getattr(wanted.gradients, part)) < bound
        assert off(found.gradients.g, gradients("passes", plain.x0).gradients.g) < 8 * HALF


def test_auto_is_bfloat16_on_cuda_only() -> None:
    assert memory_settings(ModelConfig(path="mini"), CPU) == MemorySettings()
    assert memory_settings(ModelConfig(path="mini"), torch.device("cuda")).dtype == torch.bfloat16
    assert memory_settings(ModelConfig(path="mini", dtype="float32"), torch.device("cuda")) == MemorySettings()


def test_bfloat16_trains_through_the_command_line(config_file: Path, tmp_path: Path) -> None:
    settings = ("--set", "model.dtype=bfloat16", "--set", "model.gradient_checkpointing=true")
    train(config_file, tmp_path / "run", "--set", "trainer.steps=5", *settings)
    rewards = [value for line in metrics(tmp_path / "run") for key, value in line.items() if "reward/" in key]
    assert len(rewards) == 15
    assert torch.isfinite(torch.tensor(rewards)).all()
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-5" / "adapters.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any((tensor != 0).any() for name, tensor in saved.items() if "lora_B" in name)
    outcome = marble("sample", tmp_path / "run", "--prompt", "a cup", "--steps", 2, "--out", tmp_path / "samples")
    assert outcome.code == 0, outcome.err


# float16: a scale that is too large


def overflowing(config: Path, run: Path, first: float, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(LossScale, "FIRST", first)
    train(config, run, *SMALL, "--set", "model.dtype=float16", "--set", "trainer.steps=4", *arguments)


def test_an_overflow_changes_nothing_but_the_scale(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that finds its scale by overflowing is, bit for bit, one that began with it."""
    overflowing(config_file, tmp_path / "high", 2.0**28, monkeypatch)
    first = metrics(tmp_path / "high")[0]
    assert first["guard/overflows"] == 28 - torch.tensor(first["guard/loss_scale"]).log2()
    assert first["guard/overflows"] > 3
    overflowing(config_file, tmp_path / "right", first["guard/loss_scale"], monkeypatch)
    assert lora_bytes(tmp_path / "high") == lora_bytes(tmp_path / "right")
    same = [{k: v for k, v in line.items() if k != "guard/overflows"} for line in metrics(tmp_path / "high")]
    assert same == [{k: v for k, v in line.items() if k != "guard/overflows"} for line in metrics(tmp_path / "right")]

    # A resumed run goes on with the scale it had, not with the first.
    overflowing(config_file, tmp_path / "resumed", 2.0**28, monkeypatch, "--set", "trainer.steps=2")
    overflowing(config_file, tmp_path / "resumed", 2.0**28, monkeypatch, "--resume")
    assert lora_bytes(tmp_path / "resumed") == lora_bytes(tmp_path / "high")
    assert metrics(tmp_path / "resumed")[2]["guard/overflows"] == 0


def test_the_scale_grows_back_and_is_saved() -> None:
    scale = LossScale(torch.float16)
    scale.value = 8.0
    for _ in range(LossScale.GROW_AFTER - 1):
        scale.update_done()
    again = LossScale(torch.float16)
    again.load_state_dict(scale.state_dict())
    assert again.value == 8.0
    again.update_done()
    assert again.value == 16.0
    for dtype in (torch.float32, torch.bfloat16):
        assert LossScale(dtype).value == 1.0


def test_a_run_that_is_continued_in_float16_begins_with_the_first_scale(config_file: Path, tmp_path: Path) -> None:
    steps = "trainer.steps={}".format
    train(config_file, tmp_path / "run", *SMALL, "--set", steps(1))
    train(config_file, tmp_path / "run", *SMALL, "--set", steps(2), "--set", "model.dtype=float16", "--resume")
    line = metrics(tmp_path / "run")[1]
    assert line["guard/loss_scale"] * 2 ** line["guard/overflows"] == LossScale.FIRST

    scale = LossScale(torch.float16)
    scale.load_state_dict({"value": 1.0, "clean": 77})  # as older versions saved it for other numbers
    assert scale.state_dict() == {"value": LossScale.FIRST, "clean": 0}
    assert LossScale(torch.bfloat16).state_dict() == {}


def test_gradients_that_no_scale_makes_finite_leave_it_as_it_was() -> None:
    scale, tried = LossScale(torch.float16), []
    scale.load_state_dict({"value": 8.0, "clean": 150})

    def never_finite(scale: float) -> Any:
        tried.append(scale)
        return SimpleNamespace(is_finite=False, losses_are_finite=True)

    assert not scale.applied(never_finite).is_finite
    assert tried == [8.0, 4.0, 2.0, 1.0]
    assert scale.state_dict() == {"value": 8.0, "clean": 150}


# Losses or gradients that are not finite


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of the rollouts whose latents, once scored, are not finite."""
    numbers: set[int] = set()
    real = roll_out

    def poison(*arguments: Any, index: int, **settings: Any) -> Rollout:
        rollout = real(*arguments, index=index, **settings)
        return dataclasses.replace(rollout, x0=rollout.x0 * float("nan")) if index in numbers else rollout

    monkeypatch.setattr("marble_rl.training.experience.roll_out", poison)
    return numbers


SKIP = ("--set", "optimizer.non_finite=skip", *SMALL)


@pytest.mark.parametrize("balance", ["{type: marble, refresh_every: 3}", "{type: min_variance}"])
def test_a_skipped_update_changes_nothing_and_resumes(
    config_file: Path, tmp_path: Path, poisoned: set[int], monkeypatch: pytest.MonkeyPatch, balance: str
) -> None:
    """The run is, bit for bit, one to which the bad rollout never happened: no step, moment, EMA, old policy,
    coefficient."""
    poisoned.add(1)
    skip = (*SKIP, "--set", "rollout.group_size=4", "--set", f"balance={balance}")  # advantages of two are +-1
    train(config_file, tmp_path / "skipping", *skip)
    lines = metrics(tmp_path / "skipping")
    assert [line["guard/skipped"] for line in lines] == [0, 0, 1, 0, 0, 0, 0, 0]
    train(config_file, tmp_path / "resumed", *skip, "--set", "trainer.steps=3")  # in the rollout after the skip
    train(config_file, tmp_path / "resumed", *skip, "--resume")
    assert lora_bytes(tmp_path / "resumed") == lora_bytes(tmp_path / "skipping")

    poisoned.clear()
    gather = ExperienceSource.gather
    monkeypatch.setattr(ExperienceSource, "gather", lambda self, i, *rest: gather(self, i + (i >= 1), *rest))
    train(config_file, tmp_path / "without", *skip)
    assert lora_bytes(tmp_path / "skipping") == lora_bytes(tmp_path / "without")
    for part in ("adapters", "optimizer"):
        one, other = (
            load_file(tmp_path / run / "checkpoints" / "step-8" / f"{part}.safetensors")
            for run in ("skipping", "without")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert part != "adapters" or any(one[name].any() for name in one if "lora_B" in name), "nothing was trained"
    assert [{**line, "guard/skipped": 0} for line in lines] == metrics(tmp_path / "without")


def test_a_skipped_rollout_is_gone_before_the_next_is_drawn(
    config_file: Path, tmp_path: Path, poisoned: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned.update({1, 2, 3})
    gather = ExperienceSource.gather
    drawn: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(self: ExperienceSource, *arguments: Any) -> Any:
        alive.append(sum(rollout() is not None for rollout in drawn))
        experience = gather(self, *arguments)
        drawn.append(weakref.ref(experience.rollout))
        return experience

    monkeypatch.setattr(ExperienceSource, "gather", watched)
    train(config_file, tmp_path / "run", *SKIP, "--set", "trainer.steps=4")
    assert alive == [0] * 5


def test_by_default_it_stops(config_file: Path, tmp_path: Path, poisoned: set[int]) -> None:
    poisoned.add(1)
    outcome = marble("train", config_file, "--out", tmp_path / "run", *SMALL)
    assert outcome.code == 3
    assert "step 2: a loss or gradient is not finite; the update was not applied" in outcome.err
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-2" / "adapters.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())
    assert "guard/skipped" not in metrics(tmp_path / "run")[0]


def test_too_many_in_a_row_stop_the_run(config_file: Path, tmp_path: Path, poisoned: set[int]) -> None:
    poisoned.update(range(1, 100))
    outcome = marble("train", config_file, "--out", tmp_path / "run", *SKIP)
    assert outcome.code == 3
    assert "10 updates in a row were skipped, and now step 2: a loss or gradient is not finite" in outcome.err
    assert len(metrics(tmp_path / "run")) == 2


# What saves memory


def test_checkpointing_gives_the_same_gradients(tiny_sd3: Path) -> None:
    model, _, _, checkpointed = trained_on(tiny_sd3, MemorySettings(gradient_checkpointing=True))
    assert model.transformer.is_gradient_checkpointing
    _, _, _, plain = trained_on(tiny_sd3, MemorySettings())
    found, wanted = checkpointed().gradients, plain().gradients
    assert off(found.g, wanted.g) < 1e-6
    assert off(found.shared, wanted.shared) < 1e-6


def test_decoding_in_slices_and_tiles(tiny_sd3: Path) -> None:
    images = {}
    for decoding in ("whole", "sliced", "tiled"):
        model = load_model(str(tiny_sd3), CPU, 16, memory=MemorySettings(decoding=decoding))
        assert isinstance(model, SD3Model)
        seen: list[int] = []
        decoder = model.pipeline.vae.decoder
        decoder.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape[0]))
        images[decoding] = model.decode(torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)))
        assert seen == ([3] if decoding == "whole" else [1, 1, 1])
        assert model.pipeline.vae.use_tiling == (decoding == "tiled")
    assert (images["whole"].int() - images["sliced"].int()).abs().max() <= 1


def test_quantisation_that_cannot_work_is_refused_at_once(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in found else None)
    for kind, package in (("int8", "torchao"), ("nf4", "bitsandbytes")):
        with pytest.raises(
            InputError, match=rf"model\.quantize: {kind} needs the package {package}.*marble-rl\[quant\]"
        ):
            check_inputs(load_config(config_file, [f"model.quantize={kind}"]))
    found.update({"torchao", "bitsandbytes"})
    check_quantization("int8", CPU)
    check_quantization("nf4", torch.device("cuda"))
    with pytest.raises(InputError, match=r"model\.quantize: nf4 needs a CUDA device, not cpu"):
        check_quantization("nf4", CPU)


@pytest.mark.full
def test_int8_is_float32_but_for_its_rounding(tiny_sd3: Path) -> None:
    _, plain, _, exact = trained_on(tiny_sd3, MemorySettings())
    model, rollout, policy, gradients = trained_on(tiny_sd3, MemorySettings(quantize="int8"))
    weight = model.transformer.transformer_blocks[0].attn.to_q.base_layer.weight
    assert weight.qdata.dtype == torch.int8
    assert {parameter.dtype for parameter in policy.parameters} == {torch.float32}
    assert 0 < off(rollout.x0, plain.x0) < 0.02
    assert off(gradients(x0=plain.x0).gradients.g, exact().gradients.g) < 0.05


# No memory left


def test_no_memory_for_gradients(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops with everything saved, says what helps, and goes on with it."""
    run = tmp_path / "run"
    predict = SD3Model.predict

    def starved(self: SD3Model, x: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled() and len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")
        return predict(self, x, *rest)

    monkeypatch.setattr(SD3Model, "predict", starved)
    outcome = marble("train", config_file, "--out", run, "--set", "trainer.steps=2")
    assert outcome.code == 3
    assert "stopped: out of memory in the stage 'gradients'. What helps: a smaller trainer.micro_batch" in outcome.err
    assert "model.gradient_checkpointing: true" in outcome.err
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB.)" in outcome.err
    assert (run / "checkpoints" / "step-0" / "manifest.json").exists()
    changes = ("--set", "trainer.micro_batch=2", "--set", "model.gradient_checkpointing=true")
    train(config_file, run, "--resume", "--set", "trainer.steps=2", *changes)


def test_the_micro_batch_finds_what_fits(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halved until it fits, with the update of a run that was told so; a resumed run knows the size."""
    predict = SD3Model.predict
    sizes: list[int] = []

    def starved(self: SD3Model, x: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled():
            sizes.append(len(x))
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return predict(self, x, *rest)

    train(config_file, tmp_path / "told", "--set", "trainer.steps=3", "--set", "trainer.micro_batch=2")
    monkeypatch.setattr(SD3Model, "predict", starved)
    auto = ("--set", "trainer.micro_batch=auto")
    outcome = train(config_file, tmp_path / "auto", "--set", "trainer.steps=2", *auto)
    assert [size for size in sizes if size > 2] == [4, 4], "a half holds 4 samples: 8 and 4 a pass are too many"
    assert "2 samples a training pass from here on" in outcome.err
    sizes.clear()
    train(config_file, tmp_path / "auto", "--resume", "--set", "trainer.steps=3", *auto)
    assert max(sizes) == 2
    assert lora_bytes(tmp_path / "auto") == lora_bytes(tmp_path / "told")


def test_an_automatic_micro_batch_does_not_begin_with_a_size_that_was_set() -> None:
    def sized(setting: Any) -> MicroBatch:
        return MicroBatch(setting, 16, lambda message: None)

    auto = sized("auto")
    auto.load_state_dict(sized(1).state_dict())
    assert auto.size == 16
    auto.size = 4
    again = sized("auto")
    again.load_state_dict(auto.state_dict())
    assert again.size == 4


def automatic(samples: int, say: Any = lambda message: None) -> MicroBatch:
    return MicroBatch("auto", samples, say)


def test_a_stop_for_want_of_memory_elsewhere_is_no_reason_for_a_smaller_micro_batch() -> None:
    micro_batch = automatic(16)

    def stopped(size: int) -> None:
        raise OutOfMemory("rank 1 of 2: not enough memory")

    with pytest.raises(OutOfMemory):
        micro_batch.applied(stopped)
    assert micro_batch.size == 16


def test_an_exchange_is_not_made_twice_where_memory_runs_out_after_it(
    tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes make it once."""
    model, rollout, policy, _ = trained_on(tiny_sd3, MemorySettings())
    exchanges: list[int] = []

    class Two(World):
        size = 2

        def sum_(self, tensor: Tensor) -> None:
            exchanges.append(tensor.numel())

    def starved(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    config = LossConfig(timesteps_per_sample=1)
    batch = training_batch(rollout, 0, config, seed=5, step=9)
    micro_batch = automatic(8)
    monkeypatch.setattr(GradientAccumulator, "finish", starved)
    with pytest.raises(torch.OutOfMemoryError):
        policy_gradients(
            model, policy, batch, torch.ones(8, 1), config, per_column=False, micro_batch=micro_batch, world=Two()
        )
    assert len(exchanges) == 1
    assert micro_batch.size == 8


def test_all_processes_go_on_with_the_smallest_micro_batch(config_file: Path, tmp_path: Path) -> None:
    """So that the size in the checkpoint is that of all, whenever it is written."""

    class Pressed(World):
        """Another process has come down to 2 samples a pass."""

        def largest(self, value: int) -> int:
            return max(value, -2)

    said: list[str] = []
    for micro_batch, size in ((automatic(16, said.append), 2), (automatic(1, said.append), 1)):
        micro_batch.agree(Pressed())
        assert micro_batch.size == size
    assert said == ["out of memory on another rank: 2 samples a training pass from here on (trainer.micro_batch: auto)"]
    told = MicroBatch(8, 16, said.append)
    told.agree(Pressed())
    assert told.size == 8

    trainer = Trainer(
        load_config(config_file, ["trainer.micro_batch=auto", "trainer.steps=1"]), tmp_path / "run", world=Pressed()
    )
    trainer.train()
    saved = load_newest(tmp_path / "run" / "checkpoints", said.append)
    assert saved is not None
    assert saved.state["micro_batch"] == {"size": 2}


def test_an_automatic_micro_batch_must_not_change_the_update(config_file: Path) -> None:
    settings = ("--set", "trainer.micro_batch=auto", "--set", "loss.regularize_every=2")
    outcome = marble("config", "check", config_file, *settings)
    assert outcome.code == 2
    assert "trainer.micro_batch: auto, but loss.regularize_every: 2" in outcome.err


def test_attention_backends(config_file: Path, tmp_path: Path) -> None:
    BUILDERS["flux"](tmp_path / "flux")
    for name, says in (("native", None), ("telepathy", "'telepathy' cannot be used here.*native")):
        settings = memory_settings(ModelConfig(path="x", attention=name), torch.device("cpu"))
        expected = nullcontext() if says is None else pytest.raises(InputError, match=f"model.attention: {says}")
        with expected:
            load_model(str(tmp_path / "flux"), torch.device("cpu"), memory=settings)
    outcome = marble("train", config_file, "--out", tmp_path / "run", "--set", "model.attention=native")
    assert outcome.code == 2
    assert "'native' given, but in diffusers Stable Diffusion 3 has no choice of backends" in outcome.err


class Detaching(torch.autograd.Function):
    """Attention that goes forward only, as kernels of other packages do: no gradient, or one of zeros."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda plain, q, k, v: plain(q, k, v).detach(), "gives no gradient for queries, keys, values"),
        (lambda plain, q, k, v: plain(q, k.detach(), v), "gives no gradient for keys: it can sample, but not train"),
        (lambda plain, q, k, v: Detaching.apply(plain(q, k, v)), "gives no gradient for queries, keys, values"),
        (lambda plain, q, k, v: plain(q, k, v[..., :3]).expand(7), "cannot be trained with in float32 on cpu: "),
    ],
    ids=["no gradient", "one input cut", "zeros", "an error of its own"],
)
def test_attention_that_cuts_gradients_is_refused_for_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any, says: str
) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    BUILDERS["flux"](tmp_path / "flux")
    model = load_model(str(tmp_path / "flux"), CPU, memory=MemorySettings(attention="native"))
    model.check_trainable()
    backends: dict[Any, Any] = _AttentionBackendRegistry._backends
    native = backends[AttentionBackendName.NATIVE]

    def broken(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Any:
        return changed(lambda *tensors: native(*tensors, **settings), query, key, value)

    monkeypatch.setitem(backends, AttentionBackendName.NATIVE, broken)
    config = write_config(tmp_path / "c.yaml", tmp_path / "flux")
    small = ("--set", "rollout.height=16", "--set", "rollout.width=16", "--set", "trainer.steps=1")
    outcome = marble("train", config, "--out", tmp_path / "run", "--set", "model.attention=native", *small)
    assert outcome.code == 2
    assert f"model.attention: 'native' {says}" in outcome.err
    assert not (tmp_path / "run").exists()
    load_model(str(tmp_path / "flux"), CPU, memory=MemorySettings(attention="native"))  # as sampling does


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_queries_and_keys_stay_narrow_on_cuda(family: str, tmp_path: Path) -> None:
    """Its autocast, unlike the CPU's, widens torch's RMSNorm. Tensors without numbers show it without a card."""
    from torch._subclasses import FakeTensorMode

    BUILDERS[family](tmp_path)
    model = load_model(str(tmp_path), CPU, memory=MemorySettings(dtype=torch.bfloat16))
    norms = [module for module in model.transformer.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert norms
    plain = torch.nn.RMSNorm(norms[0].normalized_shape, eps=norms[0].eps, dtype=torch.bfloat16)
    plain.load_state_dict(norms[0].state_dict())
    x = torch.randn(3, norms[0].normalized_shape[0], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norms[0](x), plain(x))
    before = torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            there = torch.empty(3, *norms[0].normalized_shape, dtype=torch.bfloat16, device="cuda")
            for norm in (plain, *norms):
                norm.weight = torch.nn.Parameter(torch.empty_like(norm.weight, device="cuda"), requires_grad=False)
            assert plain(there).dtype == torch.float32
            assert {norm(there).dtype for norm in norms} == {torch.bfloat16}
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_no_memory_for_a_reward(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [{"name": "greedy", "type": "rewards_for_tests:greedy", "retries": 0}]
    outcome = marble("train", write_config(tmp_path / "c.yaml", tiny_sd3, rewards=rewards), "--out", tmp_path / "run")
    assert outcome.code == 3
    assert "out of memory in the stage 'rewards'. What helps: a smaller batch_size of the reward" in outcome.err
    assert "reward 'greedy'" in outcome.err


def test_what_counts_as_no_memory() -> None:
    def too_much_for_torch() -> Any:
        return torch.empty(1 << 60, dtype=torch.uint8)

    for cause in (too_much_for_torch, lambda: bytearray(1 << 60)):
        with (
            pytest.raises(OutOfMemory, match=r"stage 'rollout'.*rollout\.batch_size"),
            memory_errors(lambda: "rollout"),
        ):
            cause()
    for other in (RuntimeError("shape mismatch"), RewardFailed("reward 'odd': it fell over")):
        with pytest.raises(type(other), match=str(other)), memory_errors(lambda: "rollout"):
            raise other


def test_adapters_begin_alike_whatever_the_base_is_held_in(tiny_sd3: Path) -> None:
    from marble_rl.models.settings import LoraConfig

    flats = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(str(tiny_sd3), CPU, 16, memory=MemorySettings(dtype=dtype))
        policy = LoraPolicy(model.transformer, LoraConfig(rank=2), model.lora_targets, seed=0)
        assert all(tensor.dtype == torch.float32 for name in ADAPTERS for tensor in policy.tensors(name).values())
        flats.append(policy.flat)
    assert off(flats[1], flats[0]) < HALF
