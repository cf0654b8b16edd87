"""What this process holds in memory, its own or a GPU's."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from marble_rl.errors import InputError

STATUS = Path("/proc/self/status")


def parse_device(name: str, key: str) -> torch.device:
    """One that need not be in this machine."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"{key}: unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    return device


def pick_device(name: str, key: str = "model.device") -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = parse_device(name, key)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{key}: {name!r} asked for, but no CUDA device is available; use auto or cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise InputError(f"{key}: {name!r} asked for, but there are {torch.cuda.device_count()} cards; count from 0")
    return device


def peak_resident() -> int:
    """Bytes at the highest point. Linux tells a child its parent's peak as its own in getrusage; /proc does not."""
    if STATUS.exists():
        return _status("VmHWM:")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Bytes now; where the system does not say, at the highest point so far."""
    return _status("VmRSS:") if STATUS.exists() else peak_resident()


def peak_bytes(device: torch.device) -> int:
    """At the highest point so far: what torch allocated on a GPU, else what is resident."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident()


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
