"""Stage 8: check, clip and apply the update; then the EMA and the old policy follow.

update = sum_k w_k g_k + grad mean base + beta_KL grad KL                            (docs/method.md, section 3, step 6)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marble_rl.config.schema import OldPolicyConfig, OptimizerConfig
from marble_rl.errors import NonFinite
from marble_rl.models.lora import EMA, OLD, TRAINED, LoraPolicy


class Updater:
    """AdamW on the trained adapter, and the two adapters that follow it."""

    def __init__(self, policy: LoraPolicy, config: OptimizerConfig, old_policy: OldPolicyConfig) -> None:
        self.policy = policy
        self.config = config
        self.old_policy = old_policy
        self.optimizer = torch.optim.AdamW(
            policy.parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    def apply(self, gradient: Tensor, loss: float, step: int) -> float:
        """One optimizer step with the flat gradient [P]; returns its norm before clipping.

        Raises before anything is changed if the loss or the gradient is not finite.
        """
        norm = float(gradient.to(torch.float64).norm())
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise NonFinite(
                f"step {step}: loss {loss:g}, gradient norm {norm:g}; the update was not applied. Lower optimizer.lr"
            )
        clipped = gradient * min(1.0, self.config.grad_clip / (norm + 1e-6))
        parameters = self.policy.parameters
        for parameter, part in zip(parameters, clipped.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        done = step + 1
        self.policy.blend(EMA, TRAINED, min(self.config.ema_decay, (1 + done) / (10 + done)))
        return norm

    def follow(self, done: int) -> None:
        """End of a rollout, after ``done`` optimizer steps: the old policy follows the trained one."""
        c = self.old_policy
        self.policy.blend(OLD, TRAINED, min(c.uprate * max(done - c.flat, 0), c.uphold))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state as flat tensors, keyed by the parameter's name."""
        names = self.policy.tensors(TRAINED)
        state = self.optimizer.state
        return {
            f"{name}/{key}": value
            for name, parameter in zip(names, self.policy.parameters, strict=True)
            for key, value in state[parameter].items()
        }

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in zip(self.policy.tensors(TRAINED), self.policy.parameters, strict=True):
            keys = [key for key in tensors if key.startswith(f"{name}/")]
            if keys:
                self.optimizer.state[parameter] = {
                    key.rpartition("/")[2]: tensors[key].clone().to(parameter.device if "exp" in key else "cpu")
                    for key in keys
                }
