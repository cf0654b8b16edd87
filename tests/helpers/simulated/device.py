"""The device `sim` and its memory.

A tensor on it is a plain `torch.Tensor` with a storage of its own. The bytes of that storage lie in a CPU storage that
nobody else sees: `unwrap` gives a CPU tensor over the same bytes, `wrap` a device tensor over those of a CPU tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

NAME = "sim"
HAS_FLOAT64 = os.environ.get("SIMULATED_FLOAT64") != "no"
CPU_KERNELS = DispatchKeySet(DispatchKey.CPU)
_HOST_KEYS = (DispatchKey.AutogradCPU, DispatchKey.ADInplaceOrView, DispatchKey.AutocastCPU)
_EXCLUDED = DispatchKeySet(_HOST_KEYS[0]) | DispatchKeySet(_HOST_KEYS[1]) | DispatchKeySet(_HOST_KEYS[2])


class Backend:
    """`torch.sim`. Like MPS it counts no memory."""

    generator = torch.Generator().manual_seed(20_26)
    """Another stream than the CPU's: what is drawn on the device is not what the CPU would draw."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: object = None) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed ^ 0x5EED)

    def get_rng_state(self, device: object = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]


backend = Backend()
torch.utils.backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=backend)
# `module.to` exchanges whole tensors: it cannot give an existing CPU tensor a storage on another device.
torch.__future__.set_swap_module_params_on_conversion(True)
DEVICE = torch.device(NAME, 0)


def on_host() -> Any:
    """Within it, operations on the unwrapped CPU tensors are kernels alone: no autograd, no autocast of the CPU."""
    return _ExcludeDispatchKeyGuard(_EXCLUDED)


def check_dtype(dtype: torch.dtype) -> None:
    """MPS has no float64, not even on the way to the host."""
    if dtype == torch.float64 and not HAS_FLOAT64:
        raise TypeError("Cannot convert a tensor to float64: this device does not have it. Please use float32 instead.")


def is_simulated(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def wrap(cpu: Tensor, storages: Iterable[UntypedStorage] = ()) -> Tensor:
    """A device tensor over the bytes of a CPU tensor. If these are the bytes of one of the ``storages``, it is a
    view."""
    check_dtype(cpu.dtype)
    bytes_ = cpu.untyped_storage()
    shared = (s for s in storages if bytes_.nbytes() and s._bytes.data_ptr() == bytes_.data_ptr())
    tensor = torch._C._acc.create_empty_tensor((0,), cpu.dtype)
    place(tensor, next(shared, None) or _storage_over(bytes_), cpu)
    return tensor


def unwrap(tensor: Tensor) -> Tensor:
    """The CPU tensor over the same bytes."""
    bytes_ = getattr(tensor.untyped_storage(), "_bytes", None)
    if bytes_ is None:
        assert not tensor.numel(), "a device tensor without memory"
        bytes_ = UntypedStorage(0)
    with on_host():
        cpu = torch.empty(0, dtype=tensor.dtype)
        cpu.set_(bytes_, tensor.storage_offset(), tensor.shape, tensor.stride())
        cpu = torch._conj(cpu) if tensor.is_conj() else cpu
        return torch._neg_view(cpu) if tensor.is_neg() else cpu


def follow(tensor: Tensor, cpu: Tensor) -> None:
    """After an operation wrote to ``cpu``, which may have been resized: the same size, strides and bytes."""
    storage, bytes_ = tensor.untyped_storage(), cpu.untyped_storage()
    same = getattr(storage, "_bytes", None) is not None and (storage.data_ptr(), storage.nbytes()) == (
        bytes_.data_ptr(),
        bytes_.nbytes(),
    )
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
    if not same or layout != (cpu.shape, cpu.stride(), cpu.storage_offset()):
        place(tensor, storage if same else _storage_over(bytes_), cpu)


def place(tensor: Tensor, storage: UntypedStorage, like: Tensor) -> None:
    layout = (like.storage_offset(), like.shape, like.stride())
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(CPU_KERNELS, tensor, storage, *layout)


def _storage_over(bytes_: UntypedStorage) -> UntypedStorage:
    storage: Any = torch._C._construct_storage_from_data_pointer(bytes_.data_ptr(), DEVICE, bytes_.nbytes())
    storage._bytes = bytes_  # keeps them alive
    return storage


def _teach_storages_to_move() -> None:
    """Copies of storages, as `torch.save` and `deepcopy` make them, do not pass through operations on tensors."""
    clone: Callable[[Any], Any] = UntypedStorage.clone
    cpu: Callable[[Any], Any] = UntypedStorage.cpu
    to: Callable[..., Any] = UntypedStorage.to

    def copied(self: Any) -> Any:
        return _storage_over(clone(self._bytes)) if self.device.type == NAME else clone(self)

    def to_host(self: Any) -> Any:
        return clone(self._bytes) if self.device.type == NAME else cpu(self)

    def to_device(self: Any, device: object = None, non_blocking: bool = False) -> Any:
        return self if self.device.type == NAME else _storage_over(clone(self))

    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type == NAME:
            return to_device(self)
        return to(to_host(self) if self.device.type == NAME else self, device=device)

    for name, method in {"clone": copied, "cpu": to_host, "to": moved, NAME: to_device}.items():
        setattr(UntypedStorage, name, method)


_teach_storages_to_move()
