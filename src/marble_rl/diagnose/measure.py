"""One gradient per reward for each of M independent mini-batches of a run's policy, and the products of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

import torch
from rich.console import Console
from torch import Tensor

from marble_rl.advantages import Scored, second_moments
from marble_rl.balancing.base import weight_vector
from marble_rl.balancing.registry import RULES
from marble_rl.config import RunConfig
from marble_rl.diagnose.directions import directions
from marble_rl.diagnose.record import Sample
from marble_rl.distributed.world import World
from marble_rl.errors import InputError
from marble_rl.gradients.products import gram
from marble_rl.inference.opening import Opened
from marble_rl.losses.base import Loss
from marble_rl.losses.registry import LOSSES
from marble_rl.memory.micro_batch import MicroBatch
from marble_rl.models.base import PromptCache
from marble_rl.runs.checkpoint import Checkpoint, restoring
from marble_rl.runs.inputs import check_inputs
from marble_rl.runs.log import Display
from marble_rl.training.batch import training_batch
from marble_rl.training.experience import Experience, ExperienceSource
from marble_rl.training.policy_gradients import GradientStage
from marble_rl.training.update import Updater

FIRST_ROLLOUT = 1_000_000
"""Number of the first rollout that is measured: no run has trained on it."""


@dataclass(frozen=True)
class Measured:
    """Gradients of a run's policy on M fresh mini-batches, reduced to their products."""

    names: tuple[str, ...]
    images: int
    """In each mini-batch"""
    products: Tensor
    """[M, J, M, J] float64; J = K + 1, the last column being the weighted sum"""
    advantages: Tensor
    """[M, K, K] float64: mean_i A_ki A_li over the images of each batch"""
    applied: dict[str, Tensor]
    """By direction, [M, M, K] float64: cosines of the step that AdamW would take for the direction made from batch m,
    with the rewards' gradients of batch n"""
    samples: list[Sample]
    """Of the first mini-batch"""
    directions: dict[str, Tensor]
    """By name, [M, J] weights of each batch's gradients"""
    alpha_bar: Tensor | None
    """[K] the run's smoothed coefficients, where it has any"""


def measure(
    run: Path,
    opened: Opened,
    batches: int,
    scratch: Path,
    console: Console,
    on_batch: Callable[[int], None],
    on_products: Callable[[Tensor], None],
) -> Measured:
    """``scratch``: an empty folder, where all gradients are kept while this lasts. ``on_products`` gets the products as
    soon as they are there, before anything is made of them."""
    checkpoint = opened.checkpoint
    assert opened.policy is not None
    assert opened.config is not None
    assert checkpoint is not None
    config = measuring(opened.config)
    k, size = len(config.trained_rewards), opened.policy.flat.numel()
    check_space(scratch, batches, gradients=k + 2, parameters=size)
    model, policy, names, seed = opened.model, opened.policy, config.trained_rewards, config.trainer.seed
    source = experience_source(config, opened, console)
    display = Display(Console(quiet=True), batches, 0, names, 1)
    balance = RULES.part_of(config.balance)
    weights = weight_vector(names, balance.sum_weights(config.balance))
    rule = balance(config.balance, names, adv_clip=config.loss.adv_clip, seed=seed)
    loss = LOSSES.part_of(config.loss)(config.loss)
    updater = Updater(policy, config.optimizer, config.rollout.old_policy_decay, config.trainer.steps)
    stage = gradient_stage(opened, config, loss, console)
    with restoring(checkpoint, run):
        rule.load_state_dict(checkpoint.state["balancer"])
        updater.load_optimizer_tensors(checkpoint.moments)
        restore_stage(stage, checkpoint)
    samples: list[Sample] = []
    advantages = torch.zeros(batches, k, k, dtype=torch.float64)
    # In a file: fifty batches of a large model's gradients are more than fits in memory.
    g = stored(scratch / "gradients", (batches, k + 1, size))
    shared = stored(scratch / "shared", (batches, size))
    for m in range(batches):
        experience = source.gather(FIRST_ROLLOUT + m, 0, display)
        columns = torch.cat([experience.scored.advantages, experience.scored.weighted_sum(weights)[:, None]], dim=1)
        batch = training_batch(experience.rollout, 0, loss, seed=seed, step=FIRST_ROLLOUT + m, expert_of=model.experts)
        gradients = stage.per_reward(batch, columns).gradients
        g[m], shared[m] = gradients.g.cpu(), gradients.shared.cpu()
        advantages[m] = second_moments(experience.scored.advantages)
        samples = samples or _samples(experience, experience.scored)
        on_batch(m + 1)
    products = gram(g.flatten(0, 1)).view(*g.shape[:2], *g.shape[:2])  # [M, J, M, J]
    on_products(products)
    alpha_bar = rule.coefficients(checkpoint.step) if rule.uses_gradients() else None
    every = directions(products, advantages, k, alpha_bar)
    steps = _applied(g, shared, products, every, updater, k)
    images = config.rollout.groups * config.rollout.group_size
    return Measured(names, images, products, advantages, steps, samples, every, alpha_bar)


def experience_source(config: RunConfig, opened: Opened, console: Console) -> ExperienceSource:
    """Samples with the run's policy, and scores with its rewards, which are loaded."""
    assert opened.policy is not None
    inputs = check_inputs(config)
    for remark in inputs.scorer.load(opened.model.device):
        console.print(remark, markup=False, soft_wrap=True)
    return ExperienceSource(config, inputs, opened.model, opened.policy, PromptCache(opened.model), World())


def gradient_stage(opened: Opened, config: RunConfig, loss: Loss, console: Console) -> GradientStage:
    assert opened.policy is not None
    samples = config.rollout.groups * config.rollout.group_size
    return GradientStage(
        opened.model, opened.policy, loss, MicroBatch(config.trainer.micro_batch, samples, console.print)
    )


def restore_stage(stage: GradientStage, checkpoint: Checkpoint) -> None:
    """As in training: on the loss scale, and with the micro-batch, that the run's precision and memory need."""
    stage.scale.load_state_dict(checkpoint.state.get("scale", {}))
    stage.micro_batch.load_state_dict(checkpoint.state.get("micro_batch", {}))


def check_space(folder: Path, batches: int, *, gradients: int, parameters: int) -> None:
    """Before anything is measured: a file in memory's place that outgrows its disk ends the process without a word."""
    needed, free = batches * gradients * parameters * torch.float32.itemsize, disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"--out: while they are measured, the gradients of {batches} mini-batches take {needed} bytes there, and "
            f"{free} are free; give fewer --batches or another --out"
        )


def measuring(config: RunConfig) -> RunConfig:
    """The run's config, with every rollout one mini-batch, and every reward on."""
    rewards = [reward.model_copy(update={"schedule": None, "watch": None}) for reward in config.rewards]
    groups = config.rollout.groups // config.rollout.updates
    rollout = config.rollout.model_copy(update={"groups": groups, "updates": 1})
    loss = config.loss.model_copy(update={"regularize_every": 1})
    return config.model_copy(update={"rewards": rewards, "rollout": rollout, "loss": loss})


def stored(path: Path, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.from_file(str(path), shared=True, size=count, dtype=torch.float32).view(shape)


def _applied(
    g: Tensor, shared: Tensor, products: Tensor, every: dict[str, Tensor], updater: Updater, k: int
) -> dict[str, Tensor]:
    """By direction, [M, M, K] cosines of AdamW's step with each reward's gradient in each batch; NaN where one of them
    is zero."""
    device = updater.policy.flat.device
    lengths = torch.einsum("mjmj->mj", products)[:, :k].sqrt()
    cosines = torch.empty(len(every), len(g), len(g), k, dtype=torch.float64)
    steps = torch.empty(len(every), g.shape[2])
    for m in range(len(g)):
        for i, weights in enumerate(every.values()):
            steps[i] = updater.preview((weights[m].to(g.dtype) @ g[m] + shared[m]).to(device))
        norms = torch.linalg.vector_norm(steps, dim=1, dtype=torch.float64)
        # For all directions at once: the file of gradients, which may not fit in memory, is read once a batch.
        for n in range(len(g)):
            cosines[:, m, n] = (steps @ g[n, :k].T).to(torch.float64) / (norms[:, None] * lengths[n])
    return dict(zip(every, cosines, strict=True))


def _samples(experience: Experience, scored: Scored) -> list[Sample]:
    rollout = experience.rollout
    prompts = [group.prompt for group in rollout.drawn for _ in range(rollout.group_size)]
    applicable = scored.table.applicable
    return [
        Sample(
            prompt.source,
            prompt.text,
            [float(a) if applies else None for a, applies in zip(scored.advantages[i], applicable[i], strict=True)],
        )
        for i, prompt in enumerate(prompts)
    ]
