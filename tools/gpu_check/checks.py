"""Checks of one device: each returns what it measured, or raises."""

from __future__ import annotations

import io
import json
import math
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from rich.console import Console

from marble_rl.bench.measure import Spread, largest_difference, peak_memory, time_rounds
from marble_rl.bench.workload import FUSED, PASSES, WEIGHTED_SUM, Size, Workload
from marble_rl.config import RunConfig
from marble_rl.mini import MINI
from marble_rl.models import load_model
from marble_rl.models.base import PromptCache
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.precision import automatic_dtype
from marble_rl.models.settings import LoraConfig
from marble_rl.training.trainer import Trainer

CPU_SIZE = Size(layers=2, heads=2, latent=16, text_tokens=16, rank=8, samples=4, micro_batch=2)
GPU_SIZE = Size(layers=8, heads=24, latent=64, text_tokens=256, samples=8, micro_batch=2)
"""Sizes of the random transformer: on a GPU a third of SD3.5 Medium's depth at its width, at 512 x 512."""
FUSED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""Largest difference allowed between fused gradients and those of K passes, relative to a gradient's length."""
AUTOCAST_TOLERANCE = 0.1
"""Largest relative difference allowed between bfloat16, which has eight bits of mantissa, and float32."""


class CheckFailed(Exception):
    """A check ran, and its result was wrong."""


def size_for(device: torch.device) -> Size:
    return CPU_SIZE if device.type == "cpu" else GPU_SIZE


def half(device: torch.device) -> torch.dtype:
    """The half precision to check: what `model.dtype: auto` takes; bfloat16 where that is float32."""
    automatic = automatic_dtype(device)
    return torch.bfloat16 if automatic == torch.float32 else automatic


def autocast(device: torch.device) -> str:
    """Forward and backward pass of the embedded pipeline: autocast to half precision against float32."""
    model = load_model(MINI, device)
    policy = LoraPolicy(model.transformer, LoraConfig(rank=8, alpha=16), model.lora_targets, seed=0)
    dice = torch.Generator().manual_seed(0)
    policy.load_tensors(
        "default", {n: torch.randn(t.shape, generator=dice) / 10 for n, t in policy.tensors("ema").items()}
    )
    x = torch.randn((4, *model.latent_shape(None, None)), generator=dice).to(device)
    sigma = torch.tensor([0.2, 0.4, 0.6, 0.9], device=device)
    conditioning = PromptCache(model).encode(["a red ball", "two stars", "a sign", "a house"])

    def predictions(lower: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device.type, half(device)) if lower else nullcontext():
            v = model.velocity(x, sigma, conditioning)
            gradients = torch.autograd.grad(v.float().square().mean(), policy.parameters)
        return v.detach().float(), torch.cat([g.flatten().float() for g in gradients])

    errors = [_relative(low, full) for low, full in zip(predictions(True), predictions(False), strict=True)]
    if not all(error < AUTOCAST_TOLERANCE for error in errors):  # a NaN fails, too
        raise CheckFailed(f"velocity off by {errors[0]:.1e}, gradient by {errors[1]:.1e}")
    kind = str(half(device)).removeprefix("torch.")
    return f"{kind}: velocity within {errors[0]:.1e} of float32, gradient within {errors[1]:.1e}"


def fused_gradients(device: torch.device) -> str:
    """Gradients of all rewards from one backward pass, against one pass for each reward."""
    workload = Workload(size_for(device), device)
    errors = []
    for dtype in (torch.float32, half(device)):
        most = FUSED_TOLERANCE[dtype]
        with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
            error = largest_difference(workload, FUSED[5], PASSES)
        if not error < most:
            raise CheckFailed(f"{dtype}: off by {error:.1e} of their length, more than {most:.0e}")
        errors.append(f"{str(dtype).removeprefix('torch.')} {error:.1e}")
    return "largest difference from K passes: " + ", ".join(errors)


def speed(device: torch.device) -> str:
    """Speed of a step with one gradient per reward, relative to a weighted sum."""
    rounds = time_rounds(Workload(size_for(device), device), 1 if device.type == "cpu" else 3, lambda step: None)
    ratios = {
        step.name: Spread.of([r[WEIGHTED_SUM.name] / r[step.name] for r in rounds])
        for step in (FUSED[5], PASSES, FUSED[50])
    }
    plain = Spread.of([r[WEIGHTED_SUM.name] for r in rounds]).median
    return f"weighted sum {plain:.3f} s; " + "; ".join(f"{name}: {s.median:.2f}x" for name, s in ratios.items())


def memory(device: torch.device) -> str:
    """Peak memory of such a step, each in a separate process."""
    peaks = {step.name: peak_memory(step, size_for(device), device) for step in (WEIGHTED_SUM, PASSES, FUSED[5])}
    plain = peaks[WEIGHTED_SUM.name]
    return "; ".join(f"{name}: {peak / 2**20:.0f} MiB ({peak / plain:.2f}x)" for name, peak in peaks.items())


def training(device: torch.device) -> str:
    """Two training steps on the embedded pipeline, with three rewards."""
    config = RunConfig.model_validate(
        {
            "model": {"path": MINI, "device": str(device)},
            "lora": {"rank": 8, "alpha": 16},
            "prompts": {"train": [{"name": "things", "texts": ["a red ball", "two blue stars", "a green block"]}]},
            "rewards": [
                {"name": "clipscore", "type": "clipscore", "params": {"model": MINI}},
                {"name": "small", "type": "jpeg_compressibility"},
                {"name": "bright", "type": "brightness"},
            ],
            "rollout": {"groups": 2, "group_size": 4, "steps": 3},
            "loss": {"timesteps_per_sample": 1},
            "balance": {"type": "marble", "refresh_every": 2},
            "trainer": {"steps": 2, "micro_batch": 4},
            "logging": {"images_every": None},
        }
    )
    with tempfile.TemporaryDirectory() as scratch:
        result = Trainer(config, Path(scratch) / "run", console=Console(file=io.StringIO())).train()
        lines = [json.loads(line) for line in (result.out / "metrics.jsonl").read_text().splitlines()]
        weights = sum(file.stat().st_size for file in result.lora.iterdir())
    broken = sorted({key for line in lines for key, value in line.items() if not math.isfinite(value)})
    if result.steps != 2 or broken or not weights:
        raise CheckFailed(f"{result.steps} steps, {weights} bytes of LoRA, not finite: {broken}")
    times = [f"{stage} {lines[-1][f'time/{stage}']:.2f} s" for stage in ("rollout", "gradients")]
    return f"two steps, every metric finite; of the second: {', '.join(times)}"


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())
