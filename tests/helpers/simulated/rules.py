"""Which tensors an operation may mix: CUDA's rules. CPU and device tensors do not meet, but for two cases that
native_functions.yaml names or CUDA's kernels allow."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torchgen
import yaml
from torch import Tensor

from simulated.device import DEVICE, is_simulated


@cache
def _takes_numbers_of_the_host() -> frozenset[str]:
    """Operations that are not checked: a CPU tensor without dimensions is as good as a number for them."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    entries = yaml.load(text, Loader=yaml.CSafeLoader)
    return frozenset(entry["func"].partition("(")[0] for entry in entries if entry.get("device_check") == "NoCheck")


def check_devices(operation: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise what CUDA raises. ``tensors``: with the names of their arguments."""
    schema = operation._schema
    name = ".".join(filter(None, (schema.name.removeprefix("aten::"), schema.overload_name)))
    indexing = name.startswith(("index.Tensor", "index_put", "_index_put_impl_", "_unsafe_index"))
    for argument, tensor in tensors:
        a_number = tensor.dim() == 0 and (indexing or name in _takes_numbers_of_the_host())
        an_index = indexing and argument == "indices"
        if not (is_simulated(tensor) or a_number or an_index):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {argument} is on {tensor.device}, different "
                f"from other tensors on {DEVICE} (when checking argument in method wrapper_SIM_{name})"
            )
