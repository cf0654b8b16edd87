"""The comparison of trainings: a LoRA is known by its weights, wherever its file keeps their scale."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.same_training import digest


def test_the_digest_is_that_of_the_weights(tmp_path: Path) -> None:
    """An alpha in the header, as 0.1.0 wrote it, and the same in B."""
    tensors = {f"transformer.a.{kind}.weight": torch.randn(2, 2) for kind in ("lora_A", "lora_B")}
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 4})}
    save_file(tensors, tmp_path / "old.safetensors", metadata)
    tensors["transformer.a.lora_B.weight"] *= 2
    save_file(tensors, tmp_path / "new.safetensors")
    assert digest(tmp_path / "old.safetensors") == digest(tmp_path / "new.safetensors")
    tensors["transformer.a.lora_A.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "other.safetensors")
    assert digest(tmp_path / "other.safetensors") != digest(tmp_path / "new.safetensors")
