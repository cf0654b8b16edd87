"""The learning rate of the small models: up, then down to nothing."""

from __future__ import annotations

import torch

RISE = 0.1
"""Share of the steps in which it rises."""


def rise_and_fall(optimizer: torch.optim.Optimizer, lr: float, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """One cycle. It divides by zero where the rise takes exactly one step, so it takes longer in very short runs."""
    rise = min(max(RISE, 1.5 / steps), 0.9)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=rise)
