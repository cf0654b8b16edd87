"""python -m tools.gpu_check [--device cuda]: checks that everything works on this GPU, and measures its speed.

Takes minutes and downloads nothing. Prints one block of text to paste into an issue. Exit code 1 if a check fails, 2 if
there is no such device. On a CPU the same checks run at a smaller size, which tests the checks, not the speed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from rich.console import Console
from transformers.utils import logging as transformers_logging

from marble_rl import __version__
from marble_rl.bench.measure import Spread, largest_difference, peak_memory, time_rounds
from marble_rl.bench.workload import FUSED, PASSES, WEIGHTED_SUM, Size, Workload
from marble_rl.config import RunConfig
from marble_rl.devices import pick_device
from marble_rl.errors import InputError
from marble_rl.mini import MINI
from marble_rl.models import load_model
from marble_rl.models.base import PromptCache
from marble_rl.models.lora import LoraPolicy
from marble_rl.models.settings import LoraConfig
from marble_rl.training.trainer import Trainer

SIZES = {
    "cuda": Size(layers=8, heads=24, latent=64, text_tokens=256, samples=8, micro_batch=2),
    "cpu": Size(layers=2, heads=2, latent=16, text_tokens=16, rank=8, samples=4, micro_batch=2),
}
"""Sizes of the random transformer: on a GPU a third of SD3.5 Medium's depth at its width, at 512 x 512."""
ROUNDS = {"cuda": 3, "cpu": 1}
FUSED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest difference allowed between fused gradients and those of K passes, relative to a gradient's length."""
AUTOCAST_TOLERANCE = 0.1
"""Largest relative difference allowed between bfloat16, which has eight bits of mantissa, and float32."""
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy")


class CheckFailed(Exception):
    """A check ran, and its result was wrong."""


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool
    detail: str


def run_check(name: str, check: Callable[[torch.device], str], device: torch.device) -> Outcome:
    """Run one check. A crash counts as a failure, and does not stop the other checks."""
    try:
        return Outcome(name, True, check(device))
    except Exception as error:
        return Outcome(name, False, f"{type(error).__name__}: {str(error).strip()}".replace("\n", " "))


def autocast(device: torch.device) -> str:
    """Forward and backward pass of the embedded pipeline: bfloat16 autocast against float32."""
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
        with torch.autocast(device.type, torch.bfloat16) if lower else nullcontext():
            v = model.velocity(x, sigma, conditioning)
            gradients = torch.autograd.grad(v.float().square().mean(), policy.parameters)
        return v.detach().float(), torch.cat([g.flatten().float() for g in gradients])

    errors = [_relative(low, full) for low, full in zip(predictions(True), predictions(False), strict=True)]
    if not all(error < AUTOCAST_TOLERANCE for error in errors):  # a NaN fails, too
        raise CheckFailed(f"velocity off by {errors[0]:.1e}, gradient by {errors[1]:.1e}")
    return f"velocity within {errors[0]:.1e} of float32, gradient within {errors[1]:.1e}"


def fused_gradients(device: torch.device) -> str:
    """Gradients of all rewards from one backward pass, against one pass for each reward."""
    workload = Workload(SIZES[device.type], device)
    errors = []
    for dtype, most in FUSED_TOLERANCE.items():
        with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
            error = largest_difference(workload, FUSED[5], PASSES)
        if not error < most:
            raise CheckFailed(f"{dtype}: off by {error:.1e} of their length, more than {most:.0e}")
        errors.append(f"{str(dtype).removeprefix('torch.')} {error:.1e}")
    return "largest difference from K passes: " + ", ".join(errors)


def speed(device: torch.device) -> str:
    """Speed of a step with one gradient per reward, relative to a weighted sum."""
    rounds = time_rounds(Workload(SIZES[device.type], device), ROUNDS[device.type], lambda step: None)
    ratios = {
        step.name: Spread.of([r[WEIGHTED_SUM.name] / r[step.name] for r in rounds])
        for step in (FUSED[5], PASSES, FUSED[50])
    }
    plain = Spread.of([r[WEIGHTED_SUM.name] for r in rounds]).median
    return f"weighted sum {plain:.3f} s; " + "; ".join(f"{name}: {s.median:.2f}x" for name, s in ratios.items())


def memory(device: torch.device) -> str:
    """Peak memory of such a step, each in a separate process."""
    peaks = {step.name: peak_memory(step, SIZES[device.type], device) for step in (WEIGHTED_SUM, PASSES, FUSED[5])}
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


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "bf16 autocast": autocast,
    "fused gradients": fused_gradients,
    "training": training,
    "speed": speed,
    "peak memory": memory,
}


def report(outcomes: Sequence[Outcome], device: torch.device) -> str:
    """The block of text to paste."""
    passed = sum(outcome.passed for outcome in outcomes)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return "\n".join(
        [
            "```text",
            f"marble {__version__} smoke test: {passed} of {len(outcomes)} checks passed",
            f"device: {_card(device)}",
            f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {versions}",
            *(f"{'ok  ' if outcome.passed else 'FAIL'} {outcome.name}: {outcome.detail}" for outcome in outcomes),
            "```",
        ]
    )


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type}, one thread"
    card: Any = torch.cuda.get_device_properties(device)
    return (
        f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}, "
        f"CUDA {torch.version.cuda}, bf16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
    )


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (default: cuda)")
    try:
        device = pick_device(parser.parse_args(arguments).device, "--device")
        if device.type not in SIZES:
            raise InputError(f"--device: {device.type!r} is not supported; use cuda, cuda:N or cpu")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    torch.set_num_threads(1)
    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    outcomes = []
    for name, check in CHECKS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        outcomes.append(run_check(name, check, device))
    print(report(outcomes, device))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
