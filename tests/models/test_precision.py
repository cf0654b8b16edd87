"""The dtype that the frozen base is held in: half precision, quantised weights, what saves memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from marble_rl.config import load_config
from marble_rl.errors import InputError
from marble_rl.models import check_quantization, load_model
from marble_rl.models.experts import parts_of
from marble_rl.models.lora import ADAPTERS, LoraPolicy
from marble_rl.models.precision import MemorySettings, memory_settings
from marble_rl.models.sd3 import SD3Model
from marble_rl.models.settings import ModelConfig
from marble_rl.runs.inputs import check_inputs
from runs import marble, metrics, train
from stages import trained_on
from tools.tiny import BUILDERS

CPU = torch.device("cpu")


HALF = 2.0**-8
"""Relative rounding of bfloat16; that of float16 is smaller."""


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [name if name == "sd3" else pytest.param(name, marks=pytest.mark.full) for name in BUILDERS]
)
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
        assert {part.dtype for part in parts_of(model.transformer).values()} == {dtype}
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


@pytest.mark.full
def test_int8_is_for_both_transformers(tmp_path: Path) -> None:
    BUILDERS["wan22_14b"](tmp_path)
    _, plain, _, _ = trained_on(tmp_path, MemorySettings())
    model, rollout, _, gradients = trained_on(tmp_path, MemorySettings(quantize="int8"))
    for transformer in (model.pipeline.transformer, model.pipeline.transformer_2):
        assert transformer.blocks[0].attn1.to_q.base_layer.weight.qdata.dtype == torch.int8
    assert 0 < off(rollout.x0, plain.x0) < 0.02
    assert gradients().gradients.norms.min() > 0


def test_adapters_begin_alike_whatever_the_base_is_held_in(tiny_sd3: Path) -> None:
    from marble_rl.models.settings import LoraConfig

    flats = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(str(tiny_sd3), CPU, 16, memory=MemorySettings(dtype=dtype))
        policy = LoraPolicy(model.transformer, LoraConfig(rank=2), model.lora_targets, seed=0)
        assert all(tensor.dtype == torch.float32 for name in ADAPTERS for tensor in policy.tensors(name).values())
        flats.append(policy.flat)
    assert off(flats[1], flats[0]) < HALF
