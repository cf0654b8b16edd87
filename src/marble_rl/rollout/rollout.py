"""Stage 2: sample a group of images for each prompt from the old policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marble_rl.distributed.world import DeferredError
from marble_rl.errors import NonFinite, RunStopped
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.models.lora import OLD, LoraPolicy
from marble_rl.models.pixels import UNDECODED, NonFinitePixels
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.rollout.solvers import Solver, solve_ode
from marble_rl.seeding import generator, normal_rows
from marble_rl.types import Conditioning, Group, Rollout

DIVERGED = "sampling produced latents that are not finite: the weights have diverged. Lower optimizer.lr"


def roll_out(
    model: DiffusionModel,
    policy: LoraPolicy,
    prompts: PromptCache,
    groups: tuple[Group, ...],
    config: RolloutConfig,
    *,
    seed: int,
    index: int,
    drawn: tuple[Group, ...] | None = None,
    lockstep: bool = False,
    on_group: Callable[[Tensor], None] = lambda images: None,
) -> Rollout:
    """Sample rollout number ``index``. Noise is seeded by (rollout, slot, sample), so batches do not matter to it.

    ``groups``: the groups that this rank samples. ``drawn``: the groups of all ranks; None: the same. ``on_group`` is
    called with each group's images [group_size, H, W, 3], or videos [group_size, F, H, W, 3], as soon as they are
    decoded. ``lockstep``: a latent or pixel that is not finite, or an error of ``on_group``, is raised only after all
    groups are sampled, because the other ranks wait for this rank's forward passes.
    """
    shape = model.latent_shape(config.height, config.width, config.frames)
    sigmas = model.sigmas(config.steps, shape)
    conditioning = prompts.encode([group.prompt.text for group in groups])
    rows = [(place, group.slot, s) for place, group in enumerate(groups) for s in range(config.group_size)]
    parts: list[Sampled] = []
    unreported = torch.empty(0)
    failure = DeferredError(RunStopped, lockstep)
    with policy.acting_as(OLD):
        for first in range(0, len(rows), config.images_at_once):
            batch = rows[first : first + config.images_at_once]
            noise = normal_rows((generator(seed, "rollout", index, slot, s) for _, slot, s in batch), shape)
            condition = conditioning.rows(torch.tensor([place for place, _, _ in batch]))
            part = try_sample(model, noise, condition, sigmas, config.solver)
            parts.append(part)
            unreported = torch.cat([unreported, part.images]) if len(unreported) else part.images
            if failure.held is None:
                with failure:
                    part.raise_failure()
                    while len(unreported) >= config.group_size:
                        on_group(unreported[: config.group_size])
                        unreported = unreported[config.group_size :]
    failure.raise_held()
    return Rollout(
        groups,
        drawn or groups,
        config.group_size,
        torch.cat([part.latents for part in parts]),
        torch.cat([part.images for part in parts]),
        conditioning,
        sigmas,
    )


def sample(
    model: DiffusionModel, noise: Tensor, conditioning: Conditioning, sigmas: Tensor, solver: Solver
) -> tuple[Tensor, Tensor]:
    """Clean latents [B, ...] and uint8 images [B, H, W, 3] or videos, sampled with the active adapter."""
    sampled = try_sample(model, noise, conditioning, sigmas, solver)
    sampled.raise_failure()
    return sampled.latents, sampled.images


@dataclass(frozen=True)
class Sampled:
    """Sampled latents and images, and the error if sampling failed. The error is kept, not raised, because in lockstep
    a rank must go on with its passes (`World.lockstep`)."""

    latents: Tensor
    """[B, ...]"""
    images: Tensor
    """[B, H, W, 3] uint8, videos [B, F, H, W, 3]"""
    failure: NonFinite | None
    """Set if a latent or a pixel is not finite."""

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


@torch.no_grad()
def try_sample(
    model: DiffusionModel, noise: Tensor, conditioning: Conditioning, sigmas: Tensor, solver: Solver
) -> Sampled:
    """Like ``sample``, but a failure is returned in the result and not raised."""
    x0 = solve_ode(lambda x, sigma: model.velocity(x, sigma, conditioning), noise.to(model.device), sigmas, solver)
    failure = None if torch.isfinite(x0).all() else NonFinite(DIVERGED)
    try:
        return Sampled(x0, model.decode(x0), failure)
    except NonFinitePixels as undecoded:
        return Sampled(x0, undecoded.images, failure or NonFinite(UNDECODED))
