"""Every setting of a run. The text under a field is its documentation: docs/config.md is made from it.

The sections of the parts below this package live with those parts. Defaults are those of the MARBLE paper and of
DiffusionNFT's multi-reward recipe for SD3.5 Medium.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, SerializeAsAny

from marble_rl.balancing.base import BalanceSettings
from marble_rl.balancing.marble import MarbleSettings
from marble_rl.balancing.registry import RULES
from marble_rl.config.trackers import TrackerList
from marble_rl.losses.base import LossSettings
from marble_rl.losses.nft import NftSettings
from marble_rl.losses.registry import LOSSES
from marble_rl.models.settings import LoraConfig, ModelConfig
from marble_rl.prompts.settings import PromptsConfig
from marble_rl.rewards.core.settings import GuardConfig, RewardConfig, WatchConfig
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.section import Section


class AdvantagesConfig(Section):
    """From rewards to advantages, within the images of one prompt."""

    std: Literal["group", "global"] = "group"
    """Divide by the std of the prompt's group, or by one std of the whole rollout's group-centred rewards."""


class OptimizerConfig(Section):
    """AdamW on the adapter, and the EMA of its weights."""

    lr: PositiveFloat = 3e-4
    """Learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """`linear` and `cosine` let the learning rate fall to 0 at trainer.steps: late steps then average out their noise
    instead of adding to it."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moments."""
    weight_decay: NonNegativeFloat = 1e-4
    """Decoupled weight decay."""
    grad_clip: PositiveFloat | None = 1.0
    """Upper bound of the update gradient's norm; null: none."""
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the EMA weights, which are evaluated and exported; warmed up as (1 + s) / (10 + s)."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or gradient is not finite: `stop` the run, or `skip`: drop the rollout, change nothing,
    and train on the next one; after 10 in a row the run stops all the same. An overflow of float16 is neither: the same
    gradients are computed again on a smaller scale."""


class TrainerConfig(Section):
    """How long, how reproducibly, how often to save."""

    steps: PositiveInt = 1000
    """Optimizer steps."""
    seed: int = 0
    """Everything random follows from it."""
    micro_batch: PositiveInt | Literal["auto"] = 8
    """Samples in one forward pass of training. `auto` begins with 64 and halves it whenever memory runs out, before
    anything was changed."""
    deterministic: bool = False
    """Ask torch for kernels whose result does not depend on timing, at a cost in speed; on the CPU a run is the same
    bit for bit anyway. The run stops at an operation without such a kernel."""
    shard_base: bool = False
    """Several ranks only: each keeps a shard of the frozen base model (FSDP2), for models that do not fit one
    card. See docs/distributed.md."""
    save_every: PositiveInt = 20
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept; at least 2, so that a damaged one can be skipped. The best one (`prompts.validation`) is
    kept beside them."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations of the EMA weights during training, on `prompts.validation` or else on
    `prompts.heldout`; null never evaluates. The run says what they cost."""


class EvaluationConfig(Section):
    """Seeded evaluation. It draws no training randomness."""

    steps: PositiveInt = 40
    """Sampling steps."""
    solver: Literal["euler", "dpm2"] = "euler"
    """ODE solver."""
    images_per_prompt: PositiveInt = 1
    """Images per prompt, each with its own seed."""
    seed: int = 0
    """Seed of the evaluation; image j of prompt i is the same whatever else is evaluated."""
    batch_size: PositiveInt = 8
    """Images sampled and scored at a time."""
    limit: PositiveInt | None = None
    """Evaluate at most this many prompts of each source; null evaluates all."""


class LoggingConfig(Section):
    """What a run shows while it goes on."""

    images_every: PositiveInt | None = 10
    """Steps between grids of images or videos in samples/, the first and the last step among them; null draws none."""
    fps: PositiveInt | None = None
    """Frames per second at which videos are shown and saved, also by `marble evaluate`, `sample` and `rate`; null takes
    16, and 8 for videos of up to 32 frames. Changes no result."""
    print_every: PositiveInt = 1
    """Steps between lines where the output is not a terminal."""
    trackers: TrackerList = []
    """Programs that show the run while it goes on (docs/trackers.md), each by its `type`: `tensorboard`, `wandb`,
    `trackio`. The type alone will do: `[tensorboard]`."""


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    prompts: PromptsConfig
    rollout: RolloutConfig = RolloutConfig()
    rewards: Annotated[list[RewardConfig], Field(min_length=1, max_length=1000)]
    advantages: AdvantagesConfig = AdvantagesConfig()
    loss: Annotated[SerializeAsAny[LossSettings], BeforeValidator(LOSSES.validate)] = NftSettings()
    balance: Annotated[SerializeAsAny[BalanceSettings], BeforeValidator(RULES.validate)] = MarbleSettings()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def trained_rewards(self) -> tuple[str, ...]:
        """Names of the K rewards that have a gradient, objectives and guards, in order."""
        return tuple(reward.name for reward in self.rewards if not reward.held_out)

    @property
    def guards(self) -> dict[str, GuardConfig]:
        """Trained rewards that must only stay above a floor, by name."""
        return {reward.name: reward.guard for reward in self.rewards if reward.guard is not None}

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the trained rewards that are no guards, in order."""
        return tuple(name for name in self.trained_rewards if name not in self.guards)

    @property
    def uses_gradients(self) -> bool:
        """Whether some steps need one gradient per reward: for the rule, or for guards."""
        return RULES.part_of(self.balance).uses_gradients() or bool(self.guards)

    @property
    def priorities(self) -> dict[str, float]:
        """Of the trained rewards, by name."""
        return {reward.name: reward.priority for reward in self.rewards if not reward.held_out}

    @property
    def watched_rewards(self) -> dict[str, WatchConfig]:
        """Held-out rewards that are scored during training, by name."""
        return {reward.name: reward.watch for reward in self.rewards if reward.watch is not None}

    def rewards_off(self, step: int) -> list[str]:
        """Trained rewards that are off in the step after so many updates. A schedule is looked up once per rollout, at
        its first update: the images of all its updates are scored together."""
        first = step - step % self.rollout.steps_each
        return [reward.name for reward in self.rewards if not reward.held_out and not reward.on_at(first)]
