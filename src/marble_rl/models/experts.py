"""Two transformers in the place of one: Wan 2.2 A14B has one for high noise levels and one for low ones.

To the rest of the package `Experts` is the transformer. Rollouts have one noise level in a batch, and training divides
its samples by expert (training/batch.py), so there a pass goes through one of the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from marble_rl.errors import InputError
from marble_rl.models.settings import ExpertChoice

HIGH_NOISE, LOW_NOISE = "high_noise", "low_noise"
CHOSEN: dict[ExpertChoice, tuple[str, ...]] = {
    "both": (HIGH_NOISE, LOW_NOISE),
    "high": (HIGH_NOISE,),
    "low": (LOW_NOISE,),
}
LOADED_WITH: dict[str, dict[str, Any]] = {LOW_NOISE: {"load_into_transformer_2": True}}
"""Arguments of diffusers' `load_lora_weights` for the LoRA of an expert."""


class Experts(nn.Module):
    """Rows whose timestep is at least ``boundary`` go to ``high_noise``, the others to ``low_noise``."""

    def __init__(self, high_noise: nn.Module, low_noise: nn.Module, boundary: float) -> None:
        super().__init__()
        self.high_noise: Any = high_noise
        self.low_noise: Any = low_noise
        self.boundary = boundary

    @property
    def config(self) -> Any:
        """Of both: they have the same shapes."""
        return self.high_noise.config

    def is_low(self, timestep: Tensor) -> Tensor:
        return timestep < self.boundary

    def trains(self) -> list[bool]:
        """Whether each of the two has parameters to train."""
        return [any(p.requires_grad for p in expert.parameters()) for expert in self.children()]

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, **given: Any) -> Any:
        """Each row by its expert, in the order of the rows. Returns what a transformer returns with
        ``return_dict=False``."""
        rows = (hidden_states, timestep, encoder_hidden_states)
        if timestep.is_meta:  # an estimate of memory, in which timesteps have no values
            return (self.low_noise if self.trains() == [False, True] else self.high_noise)(*rows, **given)
        low = self.is_low(timestep)
        places = [(expert, of.nonzero()[:, 0]) for expert, of in ((self.high_noise, ~low), (self.low_noise, low))]
        used = [(expert, place) for expert, place in places if len(place)]
        if len(used) == 1:
            return used[0][0](*rows, **given)
        outputs = [expert(*(row[place] for row in rows), **given)[0] for expert, place in used]
        order = torch.cat([place for _, place in used]).argsort()
        return (torch.cat(outputs)[order],)

    def enable_gradient_checkpointing(self) -> None:
        for expert in (self.high_noise, self.low_noise):
            expert.enable_gradient_checkpointing()

    def set_attention_backend(self, backend: str) -> None:
        for expert in (self.high_noise, self.low_noise):
            expert.set_attention_backend(backend)


def parts_of(transformer: nn.Module) -> dict[str, Any]:
    """The transformers of diffusers in a transformer, by the beginning of their parameters' names: its experts, or
    itself, without a name."""
    return dict(transformer.named_children()) if isinstance(transformer, Experts) else {"": transformer}


def adapted_parts(transformer: nn.Module, experts: ExpertChoice) -> dict[str, Any]:
    """Those of them that `lora.experts` chooses."""
    parts = parts_of(transformer)
    if isinstance(transformer, Experts):
        return {name: parts[name] for name in CHOSEN[experts]}
    if experts != "both":
        raise InputError(f"lora.experts: {experts!r} given, but this model has a single transformer; leave it out")
    return parts
