"""Flow-Factory: `DiffusionNFTTrainer.optimize` of trainers/nft.py."""

from __future__ import annotations

import inspect
import typing
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from tools.peers.checkout import Checkout
from tools.peers.plain import OLD, PlainPolicy

FILE = "src/flow_factory/trainers/nft.py"
UTILS = "src/flow_factory/utils"


class FlowFactory:
    """A trainer with the methods of theirs that an update takes, and what these methods ask of it."""

    num_train_timesteps = 1
    nft_beta = 0.1
    enable_kl_loss = True
    show_progress_bar = False
    epoch = step = 0

    def __init__(self, checkout: Checkout, policy: PlainPolicy, micro_batch: int, off_policy: bool) -> None:
        self.name = f"Flow-Factory, {'off' if off_policy else 'on'}-policy"
        self._off_policy = off_policy
        self.adapter = _Adapter(policy)
        batch = policy.batch
        self._count = len(batch.x0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self._count // micro_batch)
        self.optimizer = policy.optimizer
        self.training_args = _Arguments(
            per_device_batch_size=micro_batch,
            num_inner_epochs=1,
            seed=0,
            adv_clip_range=(-5.0, 5.0),
            kl_beta=1e-4,
            max_grad_norm=1.0,
        )
        self._samples = [
            SimpleNamespace(
                latents=batch.x0[i],
                embeds=batch.embeds[i],
                pooled=batch.pooled[i],
                timestep=batch.timesteps[i],
                advantage=batch.advantages[i],
            )
            for i in range(self._count)
        ]
        self._methods = self._defined(checkout)

    def run(self) -> None:
        """One update."""
        self._methods["optimize"](self, [_Sample(sample) for sample in self._samples])

    @staticmethod
    def _defined(checkout: Checkout) -> dict[str, Any]:
        names = {
            name: getattr(typing, name) for name in ("Any", "Callable", "Dict", "List", "Optional", "Tuple", "Union")
        }
        space: dict[str, Any] = {
            **names,
            "torch": torch,
            "np": np,
            "inspect": inspect,
            "randn_tensor": randn_tensor,
            "defaultdict": defaultdict,
            "tqdm": lambda of, **shown: of,
            "BaseSample": _Sample,
            "reduce_loss_info": lambda accelerator, info: {
                name: torch.cat([value.reshape(-1) for value in values]).mean().item() for name, values in info.items()
            },
        }
        checkout.define(f"{UTILS}/base.py", {"filter_kwargs", "create_generator", "to_broadcast_tensor"}, space)
        checkout.define(f"{UTILS}/noise_schedule.py", {"flow_match_sigma", "TIMESTEP_MAX"}, space)
        checkout.methods(FILE, "DiffusionNFTTrainer", {"optimize", "_compute_nft_output"}, space)
        return space

    # What their methods ask of the trainer.

    def _compute_nft_output(self, batch: dict[str, Any], timestep: Tensor, noised: Tensor) -> dict[str, Tensor]:
        output: dict[str, Tensor] = self._methods["_compute_nft_output"](self, batch, timestep, noised)
        return output

    def _sample_timesteps(self, batch_size: int) -> Tensor:
        """[1, B]: any of the batch's."""
        return torch.stack([sample.timestep for sample in self._samples[:batch_size]])[None]

    def autocast(self) -> Any:
        return nullcontext()

    def sampling_context(self) -> Any:
        """Off-policy they sample with the EMA's weights."""
        return self.adapter.acting_as(OLD) if self._off_policy else nullcontext()

    def log_data(self, figures: dict[str, Any], step: int) -> None:
        pass


class _Sample:
    """One of their samples: what `stack` makes a batch of."""

    def __init__(self, values: SimpleNamespace) -> None:
        self.values = values

    def to(self, device: torch.device) -> _Sample:
        return self

    @staticmethod
    def stack(samples: list[_Sample]) -> dict[str, Tensor]:
        def every(name: str) -> Tensor:
            return torch.stack([getattr(sample.values, name) for sample in samples])

        return {
            "all_latents": every("latents")[:, None],
            "prompt_embeds": every("embeds"),
            "pooled_prompt_embeds": every("pooled"),
            "advantage": every("advantage"),
        }


class _Arguments(SimpleNamespace):
    """Their settings, which are unpacked like a mapping."""

    def keys(self) -> Any:
        return vars(self).keys()

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


class _Adapter:
    """Their model adapter: predictions of the transformer."""

    def __init__(self, policy: PlainPolicy) -> None:
        self._policy = policy
        self.trainable_components = [policy.model]

    def forward(self, t: Tensor, latents: Tensor, prompt_embeds: Tensor, pooled_prompt_embeds: Tensor) -> Any:
        prediction = self._policy.model(
            hidden_states=latents,
            timestep=t,
            encoder_hidden_states=prompt_embeds,
            pooled_projections=pooled_prompt_embeds,
            return_dict=False,
        )[0]
        return SimpleNamespace(noise_pred=prediction)

    def rollout(self) -> None:
        self._policy.model.eval()

    def train(self) -> None:
        self._policy.model.train()

    def get_trainable_parameters(self) -> list[torch.nn.Parameter]:
        return self._policy.parameters

    def use_ref_parameters(self) -> Any:
        return self.acting_as(None)

    @contextmanager
    def acting_as(self, adapter: str | None) -> Iterator[None]:
        with self._policy.acting_as(adapter):
            yield
