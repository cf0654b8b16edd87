"""The frozen transformer in 8 or 4 bits. Its adapters stay float32, products are computed in ``model.dtype``.

Both go through diffusers. int8: torchao, weights alone, a scale for every output channel. nf4: bitsandbytes, 4-bit
normal floats in blocks of 64; CUDA only.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from marble_rl.errors import InputError
from marble_rl.precision import MemorySettings

PACKAGES = {"int8": "torchao", "nf4": "bitsandbytes"}


def check_quantization(quantize: str | None, device: torch.device) -> None:
    """Before anything is loaded."""
    if quantize is None:
        return
    package = PACKAGES[quantize]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"model.quantize: {quantize} needs the package {package}, which is not installed; "
            "pip install 'marble-rl[quant]'"
        )
    if quantize == "nf4" and device.type != "cuda":
        raise InputError(f"model.quantize: nf4 needs a CUDA device, not {device.type}; use int8, or leave it out")


def quantization(memory: MemorySettings) -> dict[str, Any]:
    """Arguments of diffusers' ``from_pretrained``."""
    if memory.quantize is None:
        return {}
    from diffusers import PipelineQuantizationConfig

    if memory.quantize == "int8":
        from diffusers import TorchAoConfig
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:  # not run by the tests: it needs a GPU
        from diffusers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=memory.dtype
        )
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping={"transformer": config})}
