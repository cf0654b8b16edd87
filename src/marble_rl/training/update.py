"""Stage 8: check, clip and apply the update; then update the EMA and the old policy.

update = sum_k w_k g_k + grad mean base + beta_KL grad KL                            (docs/method.md, section 3, step 6)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from marble_rl.config.run import OptimizerConfig
from marble_rl.devices import in_float64
from marble_rl.errors import NonFinite
from marble_rl.models.lora import EMA, OLD, TRAINED, LoraPolicy
from marble_rl.rollout.settings import OldPolicyConfig


class Updater:
    """AdamW on the trained adapter; the EMA and old-policy adapters are running averages of it."""

    intact = True
    """False while weights and optimizer moments are changing: an out-of-memory error in between leaves them
    inconsistent, and they must not be saved."""

    def __init__(self, policy: LoraPolicy, config: OptimizerConfig, old_policy: OldPolicyConfig, steps: int) -> None:
        self.policy = policy
        self.config = config
        self.old_policy = old_policy
        self.steps = steps
        self._flat = nn.Parameter(policy.flat)
        self.optimizer = torch.optim.AdamW(
            [self._flat], lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    def apply(self, gradient: Tensor, loss: float, step: int) -> float:
        """One optimizer step with the flat gradient [P]; returns its norm before clipping.

        Raises before anything is changed if the loss or the gradient is not finite.
        """
        norm = float(in_float64(gradient).norm())
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise NonFinite(
                f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}; the update was not applied. "
                "Lower optimizer.lr"
            )
        self.optimizer.param_groups[0]["lr"] = self.config.lr * schedule_factor(self.config.schedule, step / self.steps)
        self._flat.grad = gradient * self._clip_factor(norm)
        done = step + 1
        with self.changing():
            self.optimizer.step()
            self.policy.blend(EMA, TRAINED, min(self.config.ema_decay, (1 + done) / (10 + done)))
        self.optimizer.zero_grad()
        return norm

    def preview(self, gradient: Tensor) -> Tensor:
        """The direction [P] that AdamW would subtract (times lr) in a step with this gradient, without weight decay.

        m' = b1 m + (1 - b1) g,  direction = m'_hat / (sqrt(v'_hat) + eps)

        Changes nothing.
        """
        first = self.optimizer.param_groups[0]["betas"][0]
        return self._moment("exp_avg", first, self._clipped(gradient)) / self.preconditioner(gradient)

    def preconditioner(self, gradient: Tensor) -> Tensor:
        """What AdamW would divide by, for each parameter [P], in a step with this gradient. Changes nothing.

        v' = b2 v + (1 - b2) g^2,  preconditioner = sqrt(v'_hat) + eps

        Before the first step v is 0, and v'_hat = g^2.
        """
        group = self.optimizer.param_groups[0]
        return self._moment("exp_avg_sq", group["betas"][1], self._clipped(gradient) ** 2).sqrt() + float(group["eps"])

    def _moment(self, key: str, decay: float, new: Tensor) -> Tensor:
        """[P]: AdamW's running mean ``key`` (`exp_avg`, `exp_avg_sq`) after one more step, bias-corrected."""
        state = self.optimizer.state.get(self._flat, {})
        mean: Tensor = decay * state.get(key, torch.zeros_like(new)) + (1 - decay) * new
        steps = float(state.get("step", 0)) + 1
        return mean / (1 - math.pow(decay, steps))

    def _clipped(self, gradient: Tensor) -> Tensor:
        return gradient * self._clip_factor(float(gradient.norm()))

    def _clip_factor(self, norm: float) -> float:
        bound = self.config.grad_clip
        return 1.0 if bound is None else min(1.0, bound / (norm + 1e-6))

    def update_old_policy(self, done: int) -> None:
        """Blend the old policy with the trained one, at the end of a rollout and after ``done`` optimizer steps."""
        c = self.old_policy
        with self.changing():
            self.policy.blend(OLD, TRAINED, min(c.uprate * max(done - c.flat, 0), c.uphold))

    @contextmanager
    def changing(self) -> Iterator[None]:
        self.intact = False
        yield
        self.intact = True

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state. State with one value per parameter element is split up by parameter name."""
        tensors: dict[str, Tensor] = {}
        for key, value in self.optimizer.state[self._flat].items():
            if value.ndim == 0:
                tensors[key] = value
            else:
                tensors |= {f"{name}/{key}": part for name, part in self._by_name(value)}
        return tensors

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            return
        state = {key: value.clone() for key, value in tensors.items() if "/" not in key}
        for key in {name.rpartition("/")[2] for name in tensors if "/" in name}:
            flat = torch.zeros_like(self._flat)
            for name, part in self._by_name(flat):
                part.copy_(tensors[f"{name}/{key}"])
            state[key] = flat
        self.optimizer.state[self._flat] = state

    def _by_name(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """Views of a flat tensor [P] by the parameters' names."""
        parameters = self.policy.parameters
        parts = flat.detach().split([p.numel() for p in parameters])
        return [(n, part.view_as(p)) for n, p, part in zip(self.policy.names, parameters, parts, strict=True)]


def schedule_factor(schedule: str, progress: float) -> float:
    """Factor on the learning rate after ``progress`` (0 to 1) of the steps."""
    left = min(max(1.0 - progress, 0.0), 1.0)
    if schedule == "linear":
        return left
    return (1 - math.cos(math.pi * left)) / 2 if schedule == "cosine" else 1.0
