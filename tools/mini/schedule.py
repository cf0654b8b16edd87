"""The learning-rate schedule of the small models: one cycle, up and then down to 0."""

from __future__ import annotations

import torch

RISE = 0.1
"""Share of the steps in which the learning rate rises."""


def rise_and_fall(optimizer: torch.optim.Optimizer, lr: float, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """torch's OneCycleLR. It divides by zero if the rise takes exactly one step, so very short runs rise longer."""
    rise = min(max(RISE, 1.5 / steps), 0.9)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=rise)
