"""The learning-rate schedules of the small models: up, and then down to 0."""

from __future__ import annotations

import torch

RISE = 0.1
"""Share of the steps in which the learning rate rises."""
WARM_UP = 100
"""Steps"""


def rise_and_fall(optimizer: torch.optim.Optimizer, lr: float, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """torch's OneCycleLR. It divides by zero if the rise takes exactly one step, so very short runs rise longer."""
    rise = min(max(RISE, 1.5 / steps), 0.9)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=rise)


def warm_up_and_fall(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Straight up in `WARM_UP` steps, beneath a straight line down to 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps))
