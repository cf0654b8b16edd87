"""Devices by name, and how much memory this process uses on the host or on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from marble_rl.errors import InputError

STATUS = Path("/proc/self/status")


def parse_device(name: str, key: str) -> torch.device:
    """A device that this machine need not have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"{key}: unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    return device


def pick_device(name: str, key: str = "model.device") -> torch.device:
    """A device of this machine; `auto` is CUDA if there is any, else the CPU. ``key``: the setting, for messages."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = parse_device(name, key)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{key}: {name!r} given, but no CUDA device is available; use auto or cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise InputError(f"{key}: {name!r} given, but there are {torch.cuda.device_count()} GPUs, numbered from 0")
    return device


def peak_resident() -> int:
    """Peak resident memory in bytes. On Linux getrusage reports a parent's peak for its child; /proc does not."""
    if STATUS.exists():
        return _status("VmHWM:")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Resident memory in bytes; on systems without /proc, the peak so far."""
    return _status("VmRSS:") if STATUS.exists() else peak_resident()


def peak_bytes(device: torch.device) -> int:
    """Peak bytes so far: allocated by torch on a GPU, else resident memory of the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
