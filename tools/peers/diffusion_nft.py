"""DiffusionNFT: the loop over micro-batches of scripts/train_nft_sd3.py."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from tools.peers.checkout import Checkout
from tools.peers.plain import PlainPolicy

FILE = "scripts/train_nft_sd3.py"


class DiffusionNFT:
    name = "DiffusionNFT"

    def __init__(self, checkout: Checkout, policy: PlainPolicy, micro_batch: int) -> None:
        self._update = checkout.loop(FILE, "main", "train_sample_batch")
        self._policy = policy
        self._micro_batch = micro_batch

    def run(self) -> None:
        """One update."""
        self._update(self._namespace())

    def _namespace(self) -> dict[str, Any]:
        """The variables that the loop reads, as `main` has them by then. One process: nothing to reduce."""
        policy, of = self._policy, self._policy.batch
        size = self._micro_batch
        starts = range(0, len(of.x0), size)
        batches = [
            {
                "latents_clean": of.x0[i : i + size],
                "prompt_embeds": of.embeds[i : i + size],
                "pooled_prompt_embeds": of.pooled[i : i + size],
                "timesteps": of.timesteps[i : i + size, None],
                "advantages": of.advantages[i : i + size, None],
            }
            for i in starts
        ]
        train = SimpleNamespace(adv_clip_max=5.0, beta=1e-4, max_grad_norm=1.0, ema=False)
        return {
            "torch": torch,
            "defaultdict": defaultdict,
            "tqdm": lambda of, **shown: of,
            "torch_autocast": lambda **kind: nullcontext(),
            "dist": SimpleNamespace(all_reduce=lambda tensor, op: None, ReduceOp=SimpleNamespace(AVG=None)),
            "is_main_process": lambda rank: False,
            "config": SimpleNamespace(sample=SimpleNamespace(guidance_scale=1.0), train=train, use_lora=True, beta=0.1),
            "transformer_ddp": _Distributed(policy.model),
            "optimizer": policy.optimizer,
            "samples_batched_list": batches,
            "num_train_timesteps": 1,
            "effective_grad_accum_steps": len(batches),
            "info_accumulated": defaultdict(list),
            **dict.fromkeys(("current_accumulated_steps", "gradient_update_times", "global_step"), 0),
            **dict.fromkeys(("epoch", "inner_epoch", "rank"), 0),
            **dict.fromkeys(("mixed_precision_dtype", "ema", "scaler")),
            "enable_amp": False,
            "device": of.x0.device,
        }


class _Distributed:
    """A DistributedDataParallel of one process."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)
