"""The parts of a pipeline that have weights, loaded one by one: a part that lacks some of its weights is an error.

diffusers and transformers fill in random numbers for what a file lacks, and only log it. Such a pipeline would train,
and its text encoder would understand nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from marble_rl.errors import InputError, count_of
from marble_rl.models.precision import MemorySettings
from marble_rl.models.quantization import quantization

TRANSFORMERS, VAE = ("transformer", "transformer_2"), "vae"


def load_parts(index: Mapping[str, Any], path: str, memory: MemorySettings) -> dict[str, Any]:
    """Transformer, autoencoder, encoders by their names in the pipeline's ``index``, its model_index.json."""
    loaded = {}
    for part, entry in index.items():
        # Stable Diffusion 3 may come without its largest text encoder: [null, null].
        library, name = entry if isinstance(entry, list | tuple) else (None, None)
        kind: Any = None if library is None else getattr(importlib.import_module(library), str(name))
        if not inspect.isclass(kind) or not issubclass(kind, nn.Module):
            continue
        load: Any = kind.from_pretrained  # type: ignore[attr-defined]
        loaded[part], report = load(
            path,
            subfolder=part,
            dtype=memory.vae_dtype if part == VAE else memory.dtype,
            use_safetensors=True,
            output_loading_info=True,
            **(quantization(memory) if part in TRANSFORMERS else {}),
        )
        missing = sorted(report["missing_keys"])
        if missing:
            raise InputError(
                f"model.path: {path}: the files of {part!r} lack {count_of(len(missing), 'tensor')}, the first is "
                f"{missing[0]}; they would be random. Download the pipeline again, or save it again with the versions "
                "of diffusers and transformers that are installed here"
            )
    return loaded
