"""ODE solvers for dx/dsigma = v(x, sigma), from noise (sigma = 1) to the image (sigma = 0).

diffusers' schedulers do the stepping. The DPM scheduler of diffusers casts timesteps to integers. Here it gets the
model's own float noise levels instead, and the network's timestep is computed from the sigma of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

Solver = Literal["euler", "dpm2"]
Velocity = Callable[[Tensor, Tensor], Tensor]
"""v(x [B, ...], sigma [B]) -> [B, ...]"""


@torch.no_grad()
def solve_ode(velocity: Velocity, noise: Tensor, sigmas: Tensor, solver: Solver) -> Tensor:
    """Integrate from noise [B, ...] along the noise levels sigmas [T + 1]; returns the clean latents [B, ...]."""
    scheduler = _scheduler(solver, sigmas)
    x = noise
    for sigma, timestep in zip(sigmas[:-1], scheduler.timesteps, strict=True):
        v = velocity(x, sigma.to(x.device).expand(len(x)))
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
    return x


def _scheduler(solver: Solver, sigmas: Tensor) -> Any:
    """A fresh scheduler (they keep state) that steps through exactly these levels."""
    steps = len(sigmas) - 1
    if solver == "euler":
        scheduler = FlowMatchEulerDiscreteScheduler()
    else:
        scheduler = DPMSolverMultistepScheduler(
            solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero"
        )
    scheduler.set_timesteps(steps)
    scheduler.sigmas = sigmas.to("cpu", torch.float32)
    scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
    scheduler.set_begin_index(0)
    return scheduler
