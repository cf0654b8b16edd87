"""Devices by name: the CPU, and whatever accelerator torch finds (CUDA, XPU, MPS, ...). How much memory this process
uses on the host or on the device.

What a backend may lack is asked for first: MPS, for one, has no float64 and counts no peak of its memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from marble_rl.errors import InputError

STATUS = Path("/proc/self/status")
CPU = torch.device("cpu")
KINDS = ("cuda", "xpu", "mps", "hpu", "mtia")
"""Accelerators that torch has a name for, whether this machine has one or not. Others register theirs, as NPUs do."""


def accelerator() -> torch.device | None:
    """The kind of accelerator that this machine has, without an index; None where there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def device_count() -> int:
    """Accelerators of this machine."""
    return torch.accelerator.device_count()


def parse_device(name: str, key: str) -> torch.device:
    """A device that this machine need not have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    found = accelerator()
    if device is None or device.type not in ("cpu", *KINDS, *(() if found is None else (found.type,))):
        raise InputError(f"{key}: unknown device {name!r}; use auto, cpu, cuda or cuda:N (or {', '.join(KINDS[1:])})")
    return device


def pick_device(name: str, key: str = "model.device") -> torch.device:
    """A device of this machine; `auto` is its accelerator if it has one, else the CPU. ``key``: the setting, for
    messages."""
    found = accelerator()
    if name == "auto":
        return found or CPU
    device = parse_device(name, key)
    if device.type == "cpu":
        return device
    if found is None or found.type != device.type:
        there = "the CPU only" if found is None else f"the CPU and {found.type}"
        raise InputError(f"{key}: {name!r} given, but torch finds {there} on this machine; use auto or cpu")
    if device.index is not None and device.index >= device_count():
        raise InputError(
            f"{key}: {name!r} given, but this machine has {device_count()} of {device.type}, numbered from 0"
        )
    return device


def use_accelerator(index: int) -> None:
    """Make this one of the machine's accelerators the current one of this process."""
    found = accelerator()
    choose = None if found is None else _offered(found, "set_device")
    if choose is not None:
        choose(index)


def current_index(device: torch.device) -> int:
    """Which one a device without a number is, for this thread."""
    current = _offered(device, "current_device")
    return 0 if current is None else int(current())


def state_of_thread() -> Callable[[], None]:
    """What a new thread calls first to compute as this one does. torch's number of threads and its current accelerator
    belong to a thread, and would be those of a fresh process."""
    threads, found = torch.get_num_threads(), accelerator()
    in_use = None if found is None else _offered(found, "is_initialized")
    # Asking for the current one would take memory on a GPU that nobody uses.
    index = current_index(found) if found is not None and in_use is not None and in_use() else None

    def take_over() -> None:
        torch.set_num_threads(threads)
        if index is not None:
            use_accelerator(index)

    return take_over


def supports_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 itself; a GPU before Ampere does not. One that this machine lacks, as in
    an estimate, is taken for a current one."""
    found = accelerator()
    if found is None or found.type != device.type:
        return device.type != "cpu"
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8
    asked = _offered(device, "is_bf16_supported")
    if asked is not None:
        return bool(asked())
    try:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        return bool((ones @ ones == 2).all())
    except (RuntimeError, TypeError):
        return False


@cache
def has_float64(device: torch.device) -> bool:
    try:
        one = torch.ones(1, dtype=torch.float64, device=device)
        return bool((one + one == 2).all())
    except (TypeError, RuntimeError):  # of MPS, and of some XPUs
        return False


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64: on its own device if that has it, else on the CPU."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).to(torch.float64)


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Within it, if ``wanted``, torch uses only kernels that give the same bits every time, or raises RuntimeError."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when the device is first used
    before = torch.are_deterministic_algorithms_enabled()
    warn_only, benchmark = torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; the CPU has."""
    wait = _offered(device, "synchronize")
    if wait is not None:
        wait(*_index(device))


def empty_cache() -> None:
    """Give the memory that torch's allocator holds, unused, back to the device."""
    found = accelerator()
    release = None if found is None else _offered(found, "empty_cache")
    if release is not None:
        release()


def device_name(device: torch.device) -> str:
    """The product's name, where the backend tells it."""
    named = _offered(device, "get_device_name")
    return device.type if named is None else str(named(device))


def allocated_bytes(device: torch.device) -> int:
    """Bytes of torch's tensors on the device. On the CPU, and where a backend does not count them: resident memory."""
    counted = _offered(device, "memory_allocated") or _offered(device, "current_allocated_memory")  # of MPS
    return resident() if counted is None else int(counted(*_index(device)))


def peak_bytes(device: torch.device) -> int:
    """The same at its peak so far."""
    counted = _offered(device, "max_memory_allocated")
    return peak_resident() if counted is None else int(counted(device))


def peak_resident() -> int:
    """Peak resident memory in bytes. On Linux getrusage reports a parent's peak for its child; /proc does not."""
    if STATUS.exists():
        return _status("VmHWM:")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Resident memory in bytes; on systems without /proc, the peak so far."""
    return _status("VmRSS:") if STATUS.exists() else peak_resident()


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """The argument that names the device; MPS has one only, and takes none."""
    return () if device.type == "mps" else (device,)


def _offered(device: torch.device, name: str) -> Any:
    """A function of torch's module for this kind of device, such as `torch.cuda`; None where it has none."""
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
