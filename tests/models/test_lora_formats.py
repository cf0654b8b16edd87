"""An exported LoRA changes the weights alike in every program that reads it: diffusers, ComfyUI, kohya's scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from diffusers import (
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor

import families
from built_once import built_once
from lora_readers import in_own_layers, own_places, read_by_comfyui, read_by_kohya
from marble_rl.errors import InputError
from marble_rl.models import FAMILIES
from marble_rl.models.lora_files import LORA_FILE
from marble_rl.models.lora_formats import ORIGINALS, LoraFormat, write_lora
from tools.tiny import BUILDERS

TINY = {"sd3": families.SD3, "flux": families.FLUX, "qwen_image": families.QWEN, "wan": families.WAN}
EXACT = {"atol": 1e-6, "rtol": 0}
FORMATS: tuple[LoraFormat, ...] = get_args(LoraFormat)


@pytest.fixture(params=TINY)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_once(tmp_path_factory, f"tiny-{name.replace('_', '-')}", BUILDERS[name])


def changes(transformer: Any, adapter: str) -> dict[str, Tensor]:
    """By layer, what peft adds to its weight."""
    layers = {n: m for n, m in transformer.named_modules() if isinstance(m, BaseTunerLayer)}
    return {layer: module.get_delta_weight(adapter).detach() for layer, module in layers.items()}


def test_every_reader_applies_the_same_change(name: str, folder: Path, tmp_path: Path) -> None:
    """With alpha three times the rank."""
    family = TINY[name]
    model = family.load(folder)
    families.adapted(model)
    wanted = changes(model.transformer, "ema")
    for layout in FORMATS:
        model.write_lora(tmp_path / layout, "ema", layout)

    pipeline = family.plain(folder, model)
    pipeline.load_lora_weights(tmp_path / "diffusers", adapter_name="read")
    of_diffusers = changes(pipeline.transformer, "read")
    torch.testing.assert_close(of_diffusers, wanted, **EXACT)
    assert max(delta.abs().max() for delta in wanted.values()) > 0.5

    places = own_places(name, model.transformer)
    own = in_own_layers(of_diffusers, places)
    for layout in ("comfyui", "kohya") if name == "wan" else FORMATS:
        found = read_by_comfyui(tmp_path / layout / LORA_FILE, name, places, own)
        torch.testing.assert_close(found, own, **EXACT)
    by_kohya = read_by_kohya(tmp_path / "kohya" / LORA_FILE)
    torch.testing.assert_close(by_kohya, {layer.replace(".", "_"): delta for layer, delta in own.items()}, **EXACT)


def test_diffusers_opens_what_is_written_for_comfyui(name: str, folder: Path, tmp_path: Path) -> None:
    family = TINY[name]
    model = family.load(folder)
    families.adapted(model)
    model.write_lora(tmp_path, "ema", "comfyui")
    pipeline = family.plain(folder, model)
    pipeline.load_lora_weights(tmp_path, adapter_name="read")
    torch.testing.assert_close(changes(pipeline.transformer, "read"), changes(model.transformer, "ema"), **EXACT)


def test_a_scale_that_is_a_power_of_two_loses_nothing(tiny_sd3: Path, tmp_path: Path) -> None:
    model = families.SD3.load(tiny_sd3)
    policy = families.adapted(model)
    model.transformer.peft_config["ema"].lora_alpha = 0.25
    model.write_lora(tmp_path, "ema")
    written = load_file(tmp_path / LORA_FILE)
    for layer, value in policy.tensors("ema").items():
        scale = 1 if "lora_A" in layer else 8
        assert torch.equal(written[f"transformer.{layer}"] * scale, value)


ALL = {
    "StableDiffusion3Pipeline": (
        SD3Transformer2DModel,
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
        | {"joint_attention_dim": 8, "pooled_projection_dim": 8, "dual_attention_layers": (0,), "sample_size": 8},
        r".*(attn2?\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.net\.(0\.proj|2))",
    ),
    "FluxPipeline": (  # diffusers reads kohya's names for the published width only
        FluxTransformer2DModel,
        {"num_layers": 1, "num_single_layers": 1},
        r".*(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.net\.(0\.proj|2)"
        r"|single_transformer_blocks\.0\.proj_(mlp|out))",
    ),
    "QwenImagePipeline": (
        QwenImageTransformer2DModel,
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "axes_dims_rope": (2, 2, 4)},
        r".*(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|(img|txt)_mlp\.net\.(0\.proj|2))",
    ),
    "WanPipeline": (
        WanTransformer3DModel,
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 32},
        r".*(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))",
    ),
}
"""By pipeline: a transformer, and all layers that have a name in other formats."""


def adapted_transformer(pipeline: str, targets: Any, rank: int = 2) -> Any:
    """On the meta device, but for an adapter of random numbers."""
    kind, sizes, _ = ALL[pipeline]
    with torch.device("meta"):
        transformer = kind(**sizes)
        config = PeftLoraConfig(r=rank, lora_alpha=3 * rank, target_modules=targets, init_lora_weights=False)
        transformer.add_adapter(config, adapter_name="ema")
    draw = torch.Generator().manual_seed(2)
    shapes = {n: p.shape for n, p in transformer.named_parameters() if "lora_" in n}
    tensors = {n: 0.2 * torch.randn(shape, generator=draw) for n, shape in shapes.items()}
    transformer.load_state_dict(tensors, strict=False, assign=True)
    return transformer


def products(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """B A by layer, of tensors with the names of diffusers."""
    layers = sorted({key.split(".lora_")[0] for key in state})
    assert len(state) == 2 * len(layers)
    found = {key: state[f"{key}.lora_B.weight"] @ state[f"{key}.lora_A.weight"] for key in layers}
    return {layer.removeprefix("transformer."): product for layer, product in found.items()}


@pytest.mark.parametrize(
    "pipeline", [pytest.param(FluxPipeline, marks=pytest.mark.full), QwenImagePipeline, WanPipeline]
)
def test_diffusers_finds_every_layer_under_kohyas_names(pipeline: Any, tmp_path: Path) -> None:
    transformer = adapted_transformer(pipeline.__name__, ALL[pipeline.__name__][2])
    wanted = changes(transformer, "ema")
    for layout in ("comfyui", "kohya"):
        write_lora(tmp_path / layout / LORA_FILE, transformer, "ema", pipeline.__name__, layout)
        found = products(pipeline.lora_state_dict(tmp_path / layout))
        torch.testing.assert_close(found, wanted, **EXACT)
    blocks = {"FluxPipeline": 8 + 4 + 5, "QwenImagePipeline": 2 * 12, "WanPipeline": 2 * 10}
    assert len(wanted) == blocks[pipeline.__name__]


class Checkpoint(dict[str, Tensor]):
    """A checkpoint of the original code of Stable Diffusion 3; what is not given counts as zeros."""

    def pop(self, key: str, *_: Any) -> Tensor:
        return super().pop(key, torch.zeros(6))


def test_kohyas_names_for_stable_diffusion_3_are_those_of_its_checkpoints(tmp_path: Path) -> None:
    """diffusers does not read such LoRAs, but it does convert checkpoints with these names."""
    transformer = adapted_transformer("StableDiffusion3Pipeline", ALL["StableDiffusion3Pipeline"][2])
    wanted = changes(transformer, "ema")
    assert len(wanted) == 2 * (4 + 3 + 2) + (1 + 2) + 4  # the last block ends with the image; attn2 is in the first
    write_lora(tmp_path / LORA_FILE, transformer, "ema", "StableDiffusion3Pipeline", "kohya")
    changed = read_by_kohya(tmp_path / LORA_FILE)
    blocks = [f"joint_blocks.{i}.{part}" for i in range(2) for part in ("x_block", "context_block")]
    layers = ("attn.qkv", "attn.proj", "attn2.qkv", "attn2.proj", "mlp.fc1", "mlp.fc2")
    own = {f"{block}.{layer}".replace(".", "_"): f"{block}.{layer}.weight" for block in blocks for layer in layers}
    checkpoint = Checkpoint({own[module]: delta for module, delta in changed.items()})
    checkpoint["context_embedder.weight"] = torch.zeros(16, 8)
    converted = convert_sd3_transformer_checkpoint_to_diffusers(checkpoint)
    assert not checkpoint
    torch.testing.assert_close({layer: converted[f"{layer}.weight"] for layer in wanted}, wanted, **EXACT)


def test_a_layer_that_is_not_adapted_stays_as_it_is(tmp_path: Path) -> None:
    """Within one that stacks it with others."""
    transformer = adapted_transformer("StableDiffusion3Pipeline", ["attn.to_k"])
    write_lora(tmp_path / LORA_FILE, transformer, "ema", "StableDiffusion3Pipeline", "kohya")
    changed = read_by_kohya(tmp_path / LORA_FILE)
    assert changed.keys() == {f"joint_blocks_{i}_x_block_attn_qkv" for i in range(2)}
    for i in range(2):
        query, key, value = changed[f"joint_blocks_{i}_x_block_attn_qkv"].chunk(3)
        torch.testing.assert_close(key, changes(transformer, "ema")[f"transformer_blocks.{i}.attn.to_k"], **EXACT)
        assert not query.any()
        assert not value.any()


def test_what_has_no_name_is_refused(tmp_path: Path) -> None:
    transformer = adapted_transformer("StableDiffusion3Pipeline", ["attn.to_q", "norm1.linear"])
    says = r"--format: 'kohya' has no name for transformer_blocks.0.norm1.linear, .* use --format diffusers"
    with pytest.raises(InputError, match=says):
        write_lora(tmp_path / LORA_FILE, transformer, "ema", "StableDiffusion3Pipeline", "kohya")
    with pytest.raises(InputError, match=r"--format: 'comfyui' is not known for a NewPipeline; use --format diffusers"):
        write_lora(tmp_path / LORA_FILE, transformer, "ema", "NewPipeline", "comfyui")
    assert not list(tmp_path.iterdir())
    write_lora(tmp_path / LORA_FILE, transformer, "ema", "NewPipeline", "diffusers")
    assert ORIGINALS.keys() == FAMILIES.keys()
