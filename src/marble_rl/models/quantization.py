"""The frozen transformer in 8 or 4 bits. Its adapters stay in float32, products are computed in ``model.dtype``.

diffusers loads both. int8: torchao, weight-only, one scale for every output channel. nf4: bitsandbytes, 4-bit normal
floats in blocks of 64; CUDA only.
"""

from __future__ import annotations

from typing import Any

from marble_rl.models.precision import MemorySettings


def quantization(memory: MemorySettings) -> dict[str, Any]:
    """The arguments of the transformer's ``from_pretrained`` for quantised weights."""
    if memory.quantize is None:
        return {}
    if memory.quantize == "int8":
        from diffusers import TorchAoConfig
        from torchao.quantization import Int8WeightOnlyConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:  # not run by the tests: it needs a GPU
        from diffusers import BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=memory.dtype)
    return {"quantization_config": config}
