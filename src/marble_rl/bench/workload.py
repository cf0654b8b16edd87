"""The optimizer steps that the benchmark compares: the trainer's own gradient code on a random SD3 transformer.

Weights are random, because speed does not depend on them. The old policy differs from the trained one, so that every
step needs the predictions of the trained, the old and the reference policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from marble_rl.balancing.earlier import WEIGHTED_SUM as WEIGHTED_SUM_MOMENTUM
from marble_rl.balancing.fair import Fair, FairSettings
from marble_rl.balancing.harmonizer import Harmonizer
from marble_rl.balancing.momenta import STORED_AS
from marble_rl.config.run import OptimizerConfig
from marble_rl.gradients.accumulate import Method
from marble_rl.gradients.halves import SAMPLED, buffer_numbers
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.models.lora import OLD, TRAINED, LoraPolicy
from marble_rl.models.sd3 import SD3Conditioning, SD3Model
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.settings import OldPolicyConfig
from marble_rl.training.batch import TrainingBatch
from marble_rl.training.policy_gradients import GradientStage, PolicyGradients
from marble_rl.training.update import Updater

LAZY = 4
"""Lazily regularised steps compute the shared part on one in this many samples."""


@dataclass(frozen=True)
class Size:
    """Size of the benchmark. The default: 60 M parameters, 304 tokens, 8 samples in 4 micro-batches."""

    layers: int = 4
    heads: int = 10
    latent: int = 32
    text_tokens: int = 48
    rank: int = 32
    samples: int = 8
    micro_batch: int = 2

    @property
    def tokens(self) -> int:
        return (self.latent // 2) ** 2 + self.text_tokens


@dataclass(frozen=True)
class Step:
    """One kind of optimizer step."""

    name: str
    rewards: int
    """Number of rewards; 0: a weighted sum, with one advantage and one backward pass."""
    method: Method = "fused"
    regularize_every: int = 1
    fair: bool = False
    """Fair balancing; otherwise a refresh of MARBLE"""


WEIGHTED_SUM = Step("weighted sum", 0)
WEIGHTED_SUM_LAZY = Step("weighted sum, lazy", 0, regularize_every=LAZY)
PASSES = Step("K passes, K=5", 5, "passes")
FUSED = {k: Step(f"fused, K={k}", k) for k in (1, 5, 20, 50)}
FUSED_LAZY = Step("fused, K=5, lazy", 5, regularize_every=LAZY)
FAIR = {k: Step(f"fair, K={k}", k, fair=True) for k in (5, 50)}
FAIR_LAZY = Step("fair, K=5, lazy", 5, regularize_every=LAZY, fair=True)
STEPS = (WEIGHTED_SUM, WEIGHTED_SUM_LAZY, PASSES, *FUSED.values(), FUSED_LAZY, *FAIR.values(), FAIR_LAZY)


class Workload:
    """A model, a batch and an optimizer: everything that a step needs."""

    def __init__(self, size: Size, device: torch.device, seed: int = 0) -> None:
        self.size = size
        dice = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = SD3Model(random_pipeline(size), device, size.text_tokens)
        self.policy = LoraPolicy(
            self.model.transformer, LoraConfig(rank=size.rank, alpha=2 * size.rank), self.model.lora_targets, seed
        )
        self._old = {n: 0.01 * torch.randn(t.shape, generator=dice) for n, t in self.policy.tensors(OLD).items()}
        self.become_off_policy()
        self.updater = Updater(self.policy, OptimizerConfig(lr=1e-5), OldPolicyConfig(), steps=1)
        width = 64 * size.heads
        n = size.samples
        conditioning = SD3Conditioning(
            torch.randn(n, size.text_tokens, width, generator=dice), torch.randn(n, width, generator=dice)
        )
        self.batch = TrainingBatch(
            x0=torch.randn(n, 4, size.latent, size.latent, generator=dice).to(device),
            conditioning=conditioning.to(device),
            groups=torch.arange(n),
            slots=torch.arange(n),
            samples=torch.zeros(n, dtype=torch.long),
            halves=torch.arange(n) * 2 // n,
            update_samples=n,
            sigmas=torch.rand(n, 1, generator=dice) * 0.9 + 0.05,
            experts=torch.zeros(n, 1, dtype=torch.long),
            regularized=torch.ones(n, 1, dtype=torch.bool),
            seed=seed,
            step=0,
        )
        self._advantages = torch.randn(n, 1 + max(step.rewards for step in STEPS), generator=dice)
        self._fair: dict[int, Fair] = {}

    def become_off_policy(self) -> None:
        """Give the old policy other weights than the trained one's."""
        self.policy.load_tensors(OLD, self._old)

    def become_on_policy(self) -> None:
        self.policy.blend(OLD, TRAINED, 0.0)

    @property
    def advantage(self) -> Tensor:
        """[N]: of the weighted sum"""
        return self._advantages[:, 0]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for n, p in self.model.transformer.named_parameters() if "lora_" not in n)

    @property
    def trained_parameters(self) -> int:
        return int(self.policy.flat.numel())

    def buffer_bytes(self, rewards: int) -> int:
        """Bytes of the gradient buffer, the weighted-sum probe included."""
        return buffer_numbers(rewards + 1, self.trained_parameters, SAMPLED) * 4

    def gradients(self, step: Step) -> PolicyGradients:
        """Gradients as the trainer computes them. Fused steps also carry the weighted-sum probe as a column."""
        columns = step.rewards + (step.method == "fused")
        regularized = torch.zeros_like(self.batch.regularized)
        regularized[: self.size.samples // step.regularize_every] = True
        batch = replace(self.batch, regularized=regularized)
        loss = Nft(NftSettings(regularize_every=step.regularize_every))
        stage = GradientStage(self.model, self.policy, loss, self.size.micro_batch)
        if not step.rewards:
            return stage.combined(batch, self.advantage)
        advantages, halves_on = self._advantages[:, :columns], 0 if step.fair else SAMPLED
        return stage.per_reward(batch, advantages, method=step.method, halves_on=halves_on)

    def run(self, step: Step) -> None:
        """A whole step after sampling: predictions, gradients, Gram and QP where there are rewards, the update."""
        rule = self._fair_rule(step.rewards) if step.fair else None
        computed = self.gradients(step)
        g, k = computed.gradients, step.rewards
        gradient: Tensor = g.shared
        if rule is not None:
            weighing = rule.weigh(0, g.first(k))
            gradient = weighing.weights.to(g.g) @ g.g[:k] + g.shared
            rule.commit(weighing.state)
        elif k:
            harmonizer = Harmonizer([str(i) for i in range(k)])
            weights = harmonizer.refresh(g.gram[:k, :k]).weights
            gradient = weights.to(g.g) @ g.g[:k] + g.shared
        self.updater.apply(gradient, computed.base, 0)

    def _fair_rule(self, rewards: int) -> Fair:
        """With momenta, as after the first step of a run."""
        if rewards not in self._fair:
            names = [str(i) for i in range(rewards)]
            rule = Fair(FairSettings(type="fair"), names, adv_clip=5.0, seed=0)
            flat = self.policy.flat.detach()
            rule.load_tensors(
                {name: torch.randn_like(flat, dtype=STORED_AS) for name in (*names, WEIGHTED_SUM_MOMENTUM)}
            )
            rule.load_state_dict({"counted": [1.0] * rewards})
            self._fair[rewards] = rule
        return self._fair[rewards]


def random_pipeline(size: Size) -> Any:
    """An SD3 pipeline without text encoders, whose transformer has the size of the benchmark."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    width = 64 * size.heads
    transformer = SD3Transformer2DModel(
        sample_size=size.latent,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=size.layers,
        attention_head_dim=64,
        num_attention_heads=size.heads,
        caption_projection_dim=width,
        joint_attention_dim=width,
        pooled_projection_dim=width,
        pos_embed_max_size=size.latent,
        qk_norm="rms_norm",
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.02)
    absent = dict.fromkeys(
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(),  # a small one: the steps that are measured decode nothing
        **absent,
    )
