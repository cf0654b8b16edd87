"""Operations on the device: unwrap, run the CPU's kernel, wrap what is new."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from simulated.device import CPU_KERNELS, NAME, backend, check_dtype, follow, is_simulated, on_host, unwrap, wrap
from simulated.rules import check_devices

aten = torch.ops.aten
LIBRARIES: list[torch.library.Library] = []
"""Registrations end with their library."""
ON_METADATA = (
    *("as_strided", "view", "view.dtype", "view_as_real", "view_as_complex", "_reshape_alias", "unfold"),
    *("set_.source_Storage_storage_offset", "set_.source_Tensor"),
)
"""They touch no bytes: the CPU's kernel takes the device tensor itself."""
REFUSING = ("convolution", "convolution_backward")
"""Have no kernel of the CPU alone, and stop for a device that they do not know."""


class Call:
    """The arguments of one operation. A class, because closures that call themselves would keep tensors alive until the
    next garbage collection."""

    __slots__ = ("mutated", "simulated", "tensors")

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self.simulated: list[tuple[Tensor, Tensor]] = []
        self.mutated: list[tuple[Tensor, Tensor]] = []

    def to_host(self, name: str, value: Any, mutable: bool) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
            if not is_simulated(value):
                return value
            pair = (value, unwrap(value))
            self.simulated.append(pair)
            if mutable:
                self.mutated.append(pair)
            return pair[1]
        if isinstance(value, list | tuple):
            return [self.to_host(name, item, mutable) for item in value]
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"Expected a {NAME!r} device type for generator but found {value.device.type!r}")
        return value

    def to_device(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self.to_device(item) for item in value)
        if not isinstance(value, Tensor) or is_simulated(value):
            return value
        for tensor, cpu in self.simulated:
            if cpu is value:
                return tensor
        storages = (tensor.untyped_storage() for tensor, _ in self.simulated)
        return wrap(value, [storage for storage in storages if hasattr(storage, "_bytes")])


@cache
def _signature(operation: Any) -> tuple[list[str], dict[str, bool], set[str], bool]:
    """Names of the arguments, which are written to, which are tensors; whether the operation draws random numbers."""
    arguments = operation._schema.arguments
    written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in arguments}
    tensors = {a.name for a in arguments if isinstance(a.type, torch.TensorType)}
    return [a.name for a in arguments], written, tensors, torch.Tag.nondeterministic_seeded in operation.tags


def run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation without a kernel of its own here."""
    names, written, tensors, random = _signature(operation)
    call = Call()
    given = [call.to_host(name, value, written[name]) for name, value in zip(names, args, strict=False)]
    named = {name: call.to_host(name, value, written[name]) for name, value in kwargs.items()}
    if call.simulated:
        check_devices(operation, call.tensors)
    # A number in place of a tensor fits few overloads: let torch choose.
    of_tensors = (value for name, value in zip(names, args, strict=False) if name in tensors)
    numbers = any(isinstance(value, int | float | complex) for value in of_tensors)
    kernel = operation.overloadpacket if numbers else operation
    if random and "generator" in names:
        named["generator"] = backend.generator
    with on_host():
        own_stream = random and "generator" not in names
        result = _with_own_stream(kernel, given, named) if own_stream else kernel(*given, **named)
    for tensor, cpu in call.mutated:
        follow(tensor, cpu)
    return call.to_device(result)


def _with_own_stream(kernel: Any, given: list[Any], named: dict[str, Any]) -> Any:
    """Dropout and its like draw from the default generator."""
    state = torch.get_rng_state()
    torch.set_rng_state(backend.generator.get_state())
    try:
        return kernel(*given, **named)
    finally:
        backend.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(state)


def _fresh(cpu: Tensor) -> Tensor:
    """Memory that nobody has written: NaN. The CPU's is often 0, which hides that it is read."""
    if cpu.is_floating_point() and cpu.numel():
        torch.empty(0, dtype=cpu.dtype).set_(cpu.untyped_storage()).fill_(float("nan"))
    return wrap(cpu)


def empty(size: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return _fresh(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format))


def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _fresh(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Also between host and device."""
    if is_simulated(source):
        check_dtype(target.dtype)
    with on_host():
        (unwrap(target) if is_simulated(target) else target).copy_(unwrap(source) if is_simulated(source) else source)
    return target


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return copy_(target, source)


def copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    return copy_(target.resize_(source.shape), source)


def resize_(tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    cpu = unwrap(tensor)
    with on_host():
        cpu.resize_(size)
    follow(tensor, cpu)
    return tensor


def item(tensor: Tensor) -> Any:
    return unwrap(tensor).item()


KERNELS = {
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "copy_": copy_,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "resize_": resize_,
    "_local_scalar_dense": item,
}


def overload(name: str) -> Any:
    base, _, which = name.partition(".")
    return getattr(getattr(aten, base), which or "default")


def library(namespace: str = "aten") -> torch.library.Library:
    LIBRARIES.append(torch.library.Library(namespace, "IMPL"))
    return LIBRARIES[-1]


def register(own: dict[str, Any]) -> None:
    """Kernels for all operations that the CPU has some for. ``own``: those of attention."""
    registered = library()
    kernels = {**KERNELS, **own, **{name: partial(overload(name).redispatch, CPU_KERNELS) for name in ON_METADATA}}
    of_cpu = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    for name in (*REFUSING, *(full.removeprefix("aten::") for full in of_cpu if full.startswith("aten::"))):
        if name not in kernels and any("Tensor" in str(argument.type) for argument in overload(name)._schema.arguments):
            kernels[name] = partial(run, overload(name))
    for name, kernel in kernels.items():
        registered.impl(name, kernel, "PrivateUse1")
    library("_").fallback(run, "PrivateUse1")
