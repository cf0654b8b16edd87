"""The model and the batch of `marble bench`, as another program would hold them: plain peft adapters and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marble_rl.bench.workload import Size, Workload, random_pipeline

THEIRS, OLD = "default", "old"


@dataclass(frozen=True)
class Batch:
    """N samples."""

    x0: Tensor
    embeds: Tensor
    pooled: Tensor
    timesteps: Tensor
    """[N]: 0 to 1000"""
    advantages: Tensor
    """[N]"""


class PlainPolicy:
    """The benchmark's transformer with two LoRA adapters of peft, `default` and `old`, and AdamW on the first."""

    def __init__(self, size: Size, workload: Workload, off_policy: bool = True) -> None:
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformer = random_pipeline(size).transformer.requires_grad_(False)
            lora = LoraConfig(r=size.rank, lora_alpha=2 * size.rank, target_modules=list(workload.model.lora_targets))
            self.model: Any = get_peft_model(transformer, lora)
            self.model.add_adapter(OLD, lora)
            for name, parameter in self.model.named_parameters():
                if f".{OLD}." in name:
                    torch.nn.init.normal_(parameter, std=0.01 if off_policy else 0.0)
        self.model.set_adapter(THEIRS)
        self.parameters = [p for name, p in self.model.named_parameters() if f".{THEIRS}." in name]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5)
        batch = workload.batch
        self.batch = Batch(
            batch.x0,
            batch.conditioning.prompt_embeds,  # type: ignore[attr-defined]
            batch.conditioning.pooled,  # type: ignore[attr-defined]
            batch.sigmas[:, 0] * 1000,
            workload.advantage,
        )

    @contextmanager
    def acting_as(self, adapter: str | None) -> Iterator[None]:
        """``None``: without an adapter."""
        if adapter is None:
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(adapter)
            yield
        self.model.set_adapter(THEIRS)
