"""Three LoRA adapters on one transformer: `default` is trained, `old` samples, `ema` is evaluated and exported.

If the model has two transformers (experts.py), each adapter is one for both.

Each adapter is stored in one flat tensor [P]; the parameters of its layers are views of it. So copying, averaging or
updating an adapter is one operation, not a loop over layers.

A peft layer stops tracking gradients of an adapter as soon as another one is selected. Select `old` or the model
without adapters only inside ``acting_as``, and before the trained policy's forward pass. Between its forward and
backward pass peft would silently drop the gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from marble_rl.errors import InputError
from marble_rl.gradients.fused import fuse
from marble_rl.models.experts import adapted_parts, parts_of
from marble_rl.models.lora_files import check_initial_lora, initial_tensors
from marble_rl.models.settings import LoraConfig
from marble_rl.seeding import derive_seed

Adapter = Literal["default", "old", "ema"]
Role = Literal["default", "old", "ema", "base"]
"""An adapter, or `base`: the model without any."""
TRAINED: Adapter = "default"
OLD: Adapter = "old"
EMA: Adapter = "ema"
ADAPTERS: tuple[Adapter, ...] = (TRAINED, OLD, EMA)


class LoraPolicy:
    """The adapters of a transformer, all equal at the start."""

    def __init__(self, transformer: nn.Module, config: LoraConfig, default_targets: Sequence[str], seed: int) -> None:
        self._parts = adapted_parts(transformer, config.experts)
        initial = check_initial_lora(config, list(parts_of(transformer)))
        peft_config = {
            "r": config.rank,
            "lora_alpha": config.alpha,
            "init_lora_weights": "gaussian",
            "target_modules": config.targets or list(default_targets),
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "lora"))
            for name in ADAPTERS:
                for part in self._parts.values():
                    _attach(part, PeftLoraConfig(**peft_config), name)
        self._layers = [m for m in transformer.modules() if isinstance(m, BaseTunerLayer)]
        self._by_adapter = {name: _adapter_parameters(transformer, name) for name in ADAPTERS}
        self._flat = {name: _flattened(list(self._by_adapter[name].values())) for name in ADAPTERS}
        if initial:
            self.load_tensors(TRAINED, initial_tensors(initial, self._parts, self.tensors(TRAINED), config.alpha))
        for name in (OLD, EMA):
            self.blend(name, TRAINED, 0.0)
        for layer in self._layers:
            layer.cast_input_dtype_enabled = False  # it would cast to float32, and autocast back: a useless copy
        self._select(TRAINED)
        fuse(transformer)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters, in a fixed order."""
        return list(self._by_adapter[TRAINED].values())

    @property
    def names(self) -> list[str]:
        """Names of the trained parameters."""
        return list(self._by_adapter[TRAINED])

    @property
    def flat(self) -> Tensor:
        """[P]: the trained parameters in order. Changing it in place changes the parameters, which are views of it."""
        return self._flat[TRAINED]

    @contextmanager
    def acting_as(self, role: Role) -> Iterator[None]:
        """Predict with another adapter, without gradients; afterwards the trained one is selected again."""
        with torch.no_grad():
            if role == "base":
                self._enable(False)
            else:
                self._select(role)
            try:
                yield
            finally:
                if role == "base":
                    self._enable(True)
                self._select(TRAINED)

    @torch.no_grad()
    def blend(self, target: Adapter, source: Adapter, decay: float) -> None:
        """target <- decay * target + (1 - decay) * source. decay = 0 copies exactly."""
        value, other = self._flat[target], self._flat[source]
        if decay == 0.0:
            value.copy_(other)
        else:
            value.mul_(decay).add_(other, alpha=1.0 - decay)

    def equal(self, one: Adapter, other: Adapter) -> bool:
        """Whether two adapters are bit-identical."""
        return torch.equal(self._flat[one], self._flat[other])

    def tensors(self, adapter: Adapter) -> dict[str, Tensor]:
        """Parameters of an adapter by name; the names are the same for all three."""
        return {name: value.detach() for name, value in self._by_adapter[adapter].items()}

    @torch.no_grad()
    def load_tensors(self, adapter: Adapter, tensors: dict[str, Tensor]) -> None:
        """Set an adapter from ``tensors()``; ValueError if names or shapes differ."""
        own = self._by_adapter[adapter]
        if own.keys() != tensors.keys():
            raise ValueError(
                f"the saved adapter has other layers than this model: {sorted(own.keys() ^ tensors.keys())[:4]}"
            )
        for name, value in tensors.items():
            if own[name].shape != value.shape:
                sizes = f"{list(value.shape)}, not {list(own[name].shape)}"
                raise ValueError(f"the saved adapter is of another size: {name} is {sizes}")
            own[name].copy_(value)

    @torch.no_grad()
    def merge(self, adapter: Adapter) -> None:
        """Add an adapter to the transformer's weights and remove all three adapters, which leaves a plain model."""
        for layer in self._layers:
            layer.merge(adapter_names=[adapter])
        for part in self._parts.values():
            part.unload_lora()

    def _select(self, adapter: str) -> None:
        for layer in self._layers:
            layer.set_adapter([adapter])

    def _enable(self, enabled: bool) -> None:
        for layer in self._layers:
            layer.enable_adapters(enabled)


def _attach(transformer: nn.Module, config: PeftLoraConfig, name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # three adapters are intended
        try:
            transformer.add_adapter(config, adapter_name=name)  # type: ignore[operator]
        except ValueError as error:
            raise InputError(f"lora.targets: {error}") from None


def _adapter_parameters(transformer: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    marker = f".{adapter}."
    named = {n.replace(marker, "."): p for n, p in transformer.named_parameters() if "lora_" in n and marker in n}
    return dict(sorted(named.items()))


def _flattened(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor [P] that the parameters become views of; in float32, although peft uses the dtype of the base."""
    flat = torch.cat([p.detach().flatten().float() for p in parameters])
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    return flat
