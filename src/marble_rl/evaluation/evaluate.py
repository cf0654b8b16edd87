"""Seeded evaluation: the same images for the same weights, whatever else is evaluated beside them.

Image j of prompt i starts from noise drawn for (evaluation seed, i, j) alone. Training randomness is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marble_rl.config.run import EvaluationConfig
from marble_rl.distributed.world import World
from marble_rl.errors import RunStopped
from marble_rl.models.base import DiffusionModel, PromptCache
from marble_rl.prompts import PromptSet
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rollout.rollout import Sampled, try_sample
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.runs.media import encoded
from marble_rl.runs.scores import ImageScores, WeightsScores
from marble_rl.seeding import generator, normal_rows
from marble_rl.types import Prompt, RewardTable


@dataclass(frozen=True)
class KeptImage:
    """An image that is shown to people."""

    data: bytes
    """WebP, of a video an animated one: pixels of all images of a benchmark do not fit into memory"""
    notes: Mapping[str, str]
    """By reward, what it noted on the image"""


@dataclass(frozen=True)
class Evaluation:
    """Scores and pictures of one set of weights: row i * J + j is image j of prompt i."""

    prompts: Sequence[Prompt]
    images_per_prompt: int
    table: RewardTable
    """[N, K] with N = len(prompts) * images_per_prompt"""
    pictures: Mapping[int, KeptImage] = field(default_factory=dict)
    """By row, those asked for; the first rank has those of all ranks"""

    @property
    def means(self) -> dict[str, float]:
        means = {name: self.table.mean(name) for name in self.table.names}
        return {name: mean for name, mean in means.items() if mean is not None}

    def per_prompt(self, reward: str) -> Tensor:
        """[prompts]: mean over the images that the reward applies to; NaN where there are none."""
        column = self.table.names.index(reward)
        values = self.table.values[:, column].view(-1, self.images_per_prompt)
        applicable = self.table.applicable[:, column].view(-1, self.images_per_prompt)
        return (values * applicable).sum(1) / applicable.sum(1)

    def scores(self, row: int) -> dict[str, float]:
        """Of an image, from each reward that applies to it."""
        pairs = enumerate(self.table.names)
        return {name: float(self.table.values[row, k]) for k, name in pairs if self.table.applicable[row, k]}

    def record(self) -> WeightsScores:
        """Means, and every image's scores (None where a reward does not apply)."""
        places = [(prompt, j) for prompt in self.prompts for j in range(self.images_per_prompt)]
        nothing = dict.fromkeys(self.table.names)
        images = [
            ImageScores(prompt.text, prompt.source, prompt.index, j, nothing | self.scores(row))
            for row, (prompt, j) in enumerate(places)
        ]
        return WeightsScores(self.means, images)


def evaluated_prompts(prompts: PromptSet, config: EvaluationConfig) -> list[Prompt]:
    """The first ``limit`` prompts of each source, or all."""
    return [prompt for source in prompts.sources.values() for prompt in source[: config.limit]]


def evaluate(
    model: DiffusionModel,
    prompt_cache: PromptCache,
    scorer: Scorer,
    prompts: PromptSet,
    config: EvaluationConfig,
    size: RolloutConfig,
    on_images: Callable[[int], None] = lambda images: None,
    world: World | None = None,
    pictures: Collection[int] = (),
    fps: int | None = None,
) -> Evaluation:
    """Sample and score held-out prompts with whichever adapter is active. Every batch has the same shape.

    The ranks of ``world`` take whole batches, and all of them get all scores. ``pictures``: rows whose images the first
    rank gets, videos with ``fps``. Others are dropped once scored: all images of a benchmark do not fit into memory.
    """
    world = world or World()
    chosen = evaluated_prompts(prompts, config)
    work = [(prompt, j) for prompt in chosen for j in range(config.images_per_prompt)]
    shape = model.latent_shape(size.height, size.width, size.frames)
    sigmas = model.sigmas(config.steps, shape)
    batches = [work[start : start + config.batch_size] for start in range(0, len(work), config.batch_size)]
    share = world.share(len(batches))
    own = [batches[i] for i in share]
    wanted = frozenset(pictures)
    prompt_cache.prepare([prompt.text for batch in own for prompt, _ in batch])

    def sample_batch(batch: list[tuple[Prompt, int]]) -> Sampled:
        padded = batch + [batch[-1]] * (config.batch_size - len(batch))
        noise = normal_rows((generator(config.seed, "evaluation", prompt.index, j) for prompt, j in padded), shape)
        conditioning = prompt_cache.encode([prompt.text for prompt, _ in padded])
        return try_sample(model, noise, conditioning, sigmas, config.solver)

    kept: dict[int, tuple[int, bytes]] = {}
    done = 0
    failure = world.deferring(RunStopped)
    with scorer.in_background(scorer.names, [prompt for batch in own for prompt, _ in batch]) as scoring:
        for place, batch in zip(share, own, strict=True):
            sampled = sample_batch(batch)
            if failure.held is not None:
                continue  # only the passes matter now: the other ranks wait for them
            with failure:
                sampled.raise_failure()
                shown = sampled.images[: len(batch)]
                for i, image in enumerate(shown):
                    if (row := place * config.batch_size + i) in wanted:
                        kept[row] = done + i, encoded(image, ".webp", fps)
                done += len(batch)
                scoring.add(shown)
                on_images(len(batch))
        if world.lockstep and len(own) < len(batches) / world.size:
            sample_batch(batches[0])  # the shares of other ranks are one batch longer: make as many passes as they do
        failure.raise_held()
        scores = scoring.finish()
    noted = {row: KeptImage(data, scoring.notes(scored)) for row, (scored, data) in kept.items()}
    table = _joined(world.gather(scores), [len(batch) for batch in batches], world)
    gathered = world.gather_first(noted) if wanted else []
    shown_rows = {row: image for part in gathered for row, image in part.items()}
    return Evaluation(chosen, config.images_per_prompt, table, shown_rows)


def _joined(parts: Sequence[RewardTable], sizes: Sequence[int], world: World) -> RewardTable:
    """The table of all ranks, in the order of the batches. ``sizes``: images of each batch."""
    rows = torch.arange(sum(sizes)).split(list(sizes))
    values = torch.zeros(sum(sizes), len(parts[0].names), dtype=parts[0].values.dtype)
    applicable = torch.zeros(values.shape, dtype=torch.bool)
    for rank, part in enumerate(parts):
        if own := [rows[i] for i in world.share(len(sizes), rank)]:  # a rank may have had no batch
            values[torch.cat(own)], applicable[torch.cat(own)] = part.values, part.applicable
    return RewardTable(parts[0].names, values, applicable)
