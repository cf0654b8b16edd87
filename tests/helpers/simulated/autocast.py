"""Autocast by CUDA's lists, which torch's header has: what runs in half precision, what in float32, what in the widest
dtype of its inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

from simulated.device import NAME, is_simulated
from simulated.kernels import library, overload

_HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
_KINDS = "LOWER_PRECISION_FP|FP32|FP32_SET_OPT_DTYPE|PROMOTE"


def _lists() -> Iterator[tuple[str, str]]:
    """(kind, operation)"""
    for kind, body in re.findall(rf"#define AT_FORALL_({_KINDS})\(_\)(.*?[^\\])\n", _HEADER.read_text(), re.DOTALL):
        for words in re.findall(r"_\(([^)]*)\)", body):
            yield kind, ".".join(word.strip() for word in words.split(","))


def _floats(value: Any) -> Iterator[Tensor]:
    """Tensors that autocast may cast."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)
    elif is_simulated(value) and value.is_floating_point() and value.dtype != torch.float64:
        yield value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(item, dtype) for item in value]
    return value.to(dtype) if any(True for _ in _floats(value)) else value


def _run(operation: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
    with _ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastPrivateUse1)):
        given = {tensor.dtype for tensor in _floats([*args, *kwargs.values()])}
        if kind == "FP32_SET_OPT_DTYPE":
            if given - {torch.float32} and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
            return operation(*args, **kwargs)
        if kind == "PROMOTE" and torch.float32 not in given:
            return operation(*args, **kwargs)
        dtype = torch.get_autocast_dtype(NAME) if kind == "LOWER_PRECISION_FP" else torch.float32
        return operation(*(_cast(x, dtype) for x in args), **{name: _cast(x, dtype) for name, x in kwargs.items()})


def register_autocast() -> None:
    library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    lists = library()
    for kind, name in _lists():
        try:
            operation = overload(name)
        except AttributeError:  # in the list, but not in the build
            continue
        lists.impl(name, partial(_run, operation, kind), "AutocastPrivateUse1")
