"""python -m tools.gpu_check [--device cuda]: checks that everything works on this GPU, and measures its speed.

Takes minutes and downloads nothing. Prints one block of text to paste into an issue. Exit code 1 if a check fails, 2 if
there is no such device. On a CPU the same checks run at a smaller size, which tests the checks, not the speed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from marble_rl import __version__
from marble_rl.devices import accelerator, device_count, device_name, pick_device, supports_bfloat16
from marble_rl.errors import InputError
from tools.gpu_check import checks
from tools.gpu_check.families import check_family, several_ranks
from tools.tiny import BUILDERS

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "numpy")
Check = Callable[[torch.device], str]
CHECKS: dict[str, Check] = {
    "half precision": checks.autocast,
    "fused gradients": checks.fused_gradients,
    "training": checks.training,
    **{f"family {name}": check_family(name) for name in BUILDERS},
    "speed": checks.speed,
    "peak memory": checks.memory,
    "all cards": several_ranks,
}


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool
    detail: str


def run_check(name: str, check: Check, device: torch.device) -> Outcome:
    """Run one check. A crash counts as a failure, and does not stop the other checks."""
    try:
        return Outcome(name, True, check(device))
    except Exception as error:
        return Outcome(name, False, f"{type(error).__name__}: {str(error).strip()}".replace("\n", " "))


def report(outcomes: Sequence[Outcome], device: torch.device) -> str:
    """The block of text to paste."""
    passed = sum(outcome.passed for outcome in outcomes)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return "\n".join(
        [
            "```text",
            f"marble {__version__} smoke test: {passed} of {len(outcomes)} checks passed",
            f"device: {card(device)}",
            f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {versions}",
            *(f"{'ok  ' if outcome.passed else 'FAIL'} {outcome.name}: {outcome.detail}" for outcome in outcomes),
            "```",
        ]
    )


def card(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu, one thread"
    described = [f"{device_count()} x {device_name(device)} ({device.type})"]
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda device: None)(device)
    if hasattr(properties, "total_memory"):
        described.append(f"{properties.total_memory / 2**30:.0f} GiB")
    if device.type == "cuda":
        described.append(f"capability {properties.major}.{properties.minor}")
        described.append(f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}")
    described.append(f"bfloat16 {'yes' if supports_bfloat16(device) else 'no'}")
    return ", ".join(described)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--device", help="cuda, cuda:N, xpu, mps or cpu (default: the accelerator that torch finds)")
    try:
        named = parser.parse_args(arguments).device
        if named is None and accelerator() is None:
            raise InputError("--device: torch finds no accelerator on this machine; --device cpu tries the checks")
        device = pick_device(named or "auto", "--device")
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
