"""Every setting of a run. The text under a field is its documentation: docs/config.md is made from it.

Defaults are those of the MARBLE paper and of DiffusionNFT's multi-reward recipe for SD3.5 Medium.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from marble_rl.config.section import Section
from marble_rl.config.trackers import TrackerList

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Weights = dict[str, NonNegativeFloat]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
WordCount = Annotated[int, Field(ge=1, le=16)]


class ModelConfig(Section):
    """The pipeline to fine-tune."""

    path: str
    """Folder in diffusers' format, a hub id such as `stabilityai/stable-diffusion-3.5-medium`, or `mini`: the small
    one that the package carries."""
    text_length: PositiveInt | None = None
    """Tokens of the prompt that the T5 or Qwen text encoder sees (diffusers' `max_sequence_length`); null takes 256
    for Stable Diffusion 3, 512 for other families, or as many as the tokenizer was built for if that is less."""
    guidance: NonNegativeFloat | None = None
    """Guidance scale that the transformer is told, in sampling and training, where the family was distilled to follow
    one (FLUX.1-dev); null takes 3.5. Other families refuse it."""
    device: str = "auto"
    """`auto` (CUDA if there is one, else the CPU), `cpu`, `cuda`, `cuda:1`, ..."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers that the frozen transformer and text encoders are held in, and passes through them computed with; `auto`
    is bfloat16 on CUDA, float32 on the CPU. Adapters, latents and losses are float32 whatever it is."""
    vae_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The same for the autoencoder. Many overflow in float16."""
    quantize: Literal["int8", "nf4"] | None = None
    """Hold the transformer's weights in 8 bits (torchao) or 4 (bitsandbytes, CUDA only) and compute in `dtype`; needs
    the extra `quant`. null holds them in `dtype`."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the transformer's blocks for the backward pass and compute the rest again: much less
    memory, about a third more time for gradients. The gradients are the same."""
    attention: str | None = None
    """diffusers' attention backend for the transformer, such as `native` or `flash`; each needs its own package and
    card. One without a backward pass, such as `sage`, is refused for training. null takes torch's own."""
    decoding: Literal["whole", "sliced", "tiled"] | None = None
    """How latents become images: all of a batch at once (`whole`), one at a time (`sliced`), or each in overlapping
    tiles (`tiled`), whose seams are blended: images differ a little. null: `sliced` for videos, else `whole`."""


class LoraConfig(Section):
    """The trained adapter. Three copies exist: the current policy, the old policy that samples, and the EMA."""

    rank: PositiveInt = 32
    """Rank of the two factors."""
    alpha: PositiveFloat = 64.0
    """Scale: the adapter's output is multiplied by alpha / rank."""
    targets: list[str] | None = None
    """Module names to adapt; null takes the model family's attention projections."""
    init: Path | None = None
    """LoRA to start from instead of from nothing: a file or folder that diffusers' `save_lora_weights` wrote, such as
    the `lora/` of a run. Rank, alpha and layers must be the same. The KL term still pulls towards the bare model.
    Relative to the config file."""


class GeneratedPromptsConfig(Section):
    """What all generators have in common."""

    count: Annotated[int, Field(ge=1, le=1_000_000)]
    """How many prompts. The first of them are the same whatever the count; no prompt comes twice."""
    seed: int = 0
    """Another seed gives other prompts, or the same ones in another order."""
    part: Literal["train", "heldout", "all"] | None = None
    """A fifth of what can be asked for is held out, the same fifth for every seed. null takes the part named like the
    list in which the source stands, so that `prompts.train` and `prompts.heldout` never overlap."""
    exclude: Path | None = None
    """Prompt file or dataset folder: nothing that its prompts (in a folder, the test prompts) ask for is asked for
    here, in whatever words. Relative to the config file."""


class GenevalPromptsConfig(GeneratedPromptsConfig):
    """Prompts of GenEval's six tasks over COCO's 80 objects, with the metadata that the `geneval` reward checks."""

    type: Literal["geneval"]
    tasks: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """Weights by task: `single_object`, `two_object`, `counting`, `colors`, `position`, `color_attr`. A task that is
    not named gets none. null takes flow_grpo's training mix: position 7, counting 5, color_attr 3, colors 1,
    two_object 1."""


class OcrPromptsConfig(GeneratedPromptsConfig):
    """Prompts for pictures with writing, with the `target` that the `ocr` and `tesseract` rewards read."""

    type: Literal["ocr"]
    words: tuple[WordCount, WordCount] = (1, 4)
    """Least and most words to be written, up to 16; every number between them is as frequent."""
    numbers: Fraction = 0.2
    """Share of the texts that end with a number, from 1 to 999."""


class PromptSourceConfig(Section):
    """Some prompts. Give exactly one of `file`, `texts` and `generate`."""

    name: Name
    """Name of the source, in logs and tables."""
    file: Path | None = None
    """`.txt` (one prompt a line), `.jsonl` (`prompt`, any metadata, optionally `rewards`: the names that apply), `.csv`
    or `.tsv` (a column `prompt`), or a folder with such a file for `train` and one for `test`. Relative to the config
    file."""
    texts: list[str] | None = None
    """The prompts themselves."""
    generate: Annotated[GenevalPromptsConfig | OcrPromptsConfig, Field(discriminator="type")] | None = None
    """Prompts made by rule: `type: geneval` or `type: ocr`."""
    rewards: list[str] | None = None
    """Rewards that apply to these prompts; null leaves it to each reward."""
    share: PositiveFloat = 1.0
    """Relative number of prompt groups in every rollout."""


class PromptsConfig(Section):
    """What to draw, and what to evaluate on."""

    train: list[PromptSourceConfig]
    """Sources mixed in every rollout."""
    heldout: list[PromptSourceConfig] | None = None
    """Sources for evaluation; null evaluates on the training prompts."""


class OldPolicyConfig(Section):
    """After each rollout: old <- d old + (1 - d) current, d = min(uprate * max(step - flat, 0), uphold)."""

    flat: Annotated[int, Field(ge=0)] = 0
    """Steps during which the old policy is the current one."""
    uprate: NonNegativeFloat = 0.001
    """Growth of d per step after that."""
    uphold: Fraction = 0.5
    """Upper bound of d."""


OLD_POLICY_PRESETS = {
    "on_policy": OldPolicyConfig(flat=0, uprate=0.0, uphold=0.0),
    "default": OldPolicyConfig(flat=0, uprate=0.001, uphold=0.5),
    "slow": OldPolicyConfig(flat=75, uprate=0.0075, uphold=0.999),
}


class RolloutConfig(Section):
    """Sampling from the old policy. There is no classifier-free guidance: NFT trains the model to do without it."""

    groups: PositiveInt = 48
    """Prompts in a rollout."""
    group_size: Annotated[int, Field(ge=2)] = 24
    """Images per prompt; advantages compare an image with the others of its group, so at least 2."""
    steps: PositiveInt = 25
    """Sampling steps."""
    solver: Literal["euler", "dpm2"] = "dpm2"
    """ODE solver: `euler`, or `dpm2` (second-order multistep DPM-Solver++)."""
    height: PositiveInt | None = None
    """Image height in pixels; null takes the model's own."""
    width: PositiveInt | None = None
    """Image width in pixels; null takes the model's own."""
    frames: PositiveInt | None = None
    """Frames of a video, for Wan 1 more than a multiple of 4; null takes the model's own. Image models refuse it."""
    batch_size: PositiveInt | None = None
    """Images sampled at a time; must divide group_size. null samples a whole group at once."""
    updates: PositiveInt = 1
    """Optimizer updates per rollout; must divide groups."""
    old_policy: Literal["on_policy", "default", "slow"] | OldPolicyConfig = "default"
    """How the sampling policy follows the trained one: `on_policy` (0, 0, 0), `default` (0, 0.001, 0.5),
    `slow` (75, 0.0075, 0.999), or a mapping with flat, uprate and uphold."""

    @property
    def old_policy_decay(self) -> OldPolicyConfig:
        return OLD_POLICY_PRESETS[self.old_policy] if isinstance(self.old_policy, str) else self.old_policy

    @property
    def images_at_once(self) -> int:
        return self.batch_size or self.group_size


class WatchConfig(Section):
    """Watching a held-out reward during training, for signs that the trained ones are being exploited."""

    action: Literal["warn", "stop"] = "warn"
    """What to do when it falls while the trained rewards rise: `warn`, or `stop` the run with everything saved."""
    window: Annotated[int, Field(ge=2)] = 10
    """Rollouts whose mean is compared with that of as many earlier ones."""


class RewardConfig(Section):
    """One reward."""

    type: str
    """A built-in (`marble rewards list`), or the import path `package.module:name` of a function or class."""
    name: Name
    """Its name in metrics, tables and elsewhere in this config."""
    params: dict[str, Any] = {}
    """Arguments of the reward."""
    held_out: bool = False
    """Scored in evaluations only, never trained on."""
    optional: bool = False
    """Only for held-out rewards: go on without it where it cannot be loaded (a package is missing, say)."""
    watch: WatchConfig | None = None
    """Only for held-out rewards: score it on the training images too (`watch/<name>`), and sound the alarm when it
    falls while the trained rewards rise; null does not."""
    clip: tuple[float | None, float | None] | None = None
    """[lowest, highest] score that training tells apart, in the reward's own units, null for no bound. Beyond it more
    brings no advantage; logs and evaluations show the scores as they are."""
    schedule: list[tuple[Annotated[int, Field(ge=0)], PositiveInt | None]] | None = None
    """[from, until] pairs of steps in which it is trained, null for no end; outside them it is not even scored in
    training. null always trains it."""
    device: str | None = None
    """Where its model runs, such as `cpu` or `cuda:1`; null leaves it to the reward, mostly the trained model's."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """Of its torch operations, by autocast; null leaves it to the reward."""
    batch_size: PositiveInt | None = None
    """Most images in one call; null leaves it to the reward, mostly all of a group."""
    cache: bool | None = None
    """Whether a batch that it has scored before keeps its scores; null does so if the reward is deterministic."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """Further attempts after a failure, then the run stops with everything saved; null leaves it to the reward,
    mostly 1."""
    backoff: NonNegativeFloat = 0.5
    """Seconds before the first further attempt, doubled for each one after it."""
    timeout: PositiveFloat | None = None
    """Seconds that one call may take; null waits for ever."""

    def on_at(self, step: int) -> bool:
        if self.schedule is None:
            return True
        return any(begin <= step and (end is None or step < end) for begin, end in self.schedule)


class AdvantagesConfig(Section):
    """From rewards to advantages, within the images of one prompt."""

    std: Literal["group", "global"] = "group"
    """Divide by the std of the prompt's group, or by one std of the whole rollout's group-centred rewards."""


class LossConfig(Section):
    """DiffusionNFT."""

    beta: PositiveFloat = 0.1
    """How far the implicit positive and negative policies lie from the old one (DiffusionNFT: 1 for one reward,
    0.1 for several)."""
    adv_clip: PositiveFloat = 5.0
    """A_max: each advantage is clamped to +-A_max before anything else happens to it."""
    kl_weight: NonNegativeFloat = 1e-4
    """Weight of the pull towards the model without adapter; 0 also saves its forward pass."""
    regularize_every: PositiveInt = 1
    """Lazy regularisation: this pull, and on refresh steps the one towards the old policy, on one in so many
    micro-batches with as many times the weight. The same update on average, with fewer forward and backward passes."""
    timestep_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.99
    """Train on the first part of the sampling timesteps (the last ones hardly carry noise)."""
    timesteps_per_sample: PositiveInt | None = None
    """How many of them to train each image on, drawn anew in each step; null trains on all."""


class MarbleBalance(Section):
    """MARBLE: one direction that is good for every reward, found by a quadratic program."""

    type: Literal["marble"] = "marble"
    refresh_every: PositiveInt = 10
    """Optimizer steps between two solutions of the quadratic program; 1 solves it in every step."""
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.7
    """rho: smoothing of the coefficients over refreshes."""
    smooth: Literal["alpha", "gram"] = "alpha"
    """What is smoothed: `alpha` the solutions (the paper), `gram` the products of the unit gradients, before the
    problem is solved."""
    solver: Literal["min_norm", "noise_aware", "equal"] = "min_norm"
    """`min_norm`: the min-norm point of the hull of the unit gradients. `noise_aware`, an experiment: the shortest step
    that makes progress along what is not noise in them; needs `smooth: gram`. `equal`, an ablation: the mean of the
    unit gradients."""
    apply: Literal["alpha", "alpha_over_norm"] = "alpha"
    """Steps between refreshes. `alpha`: combine the advantages by the smoothed coefficients (the paper), so the reward
    with the larger gradient counts for more. `alpha_over_norm`: divide by cached gradient norms first."""
    gradients: Literal["fused", "passes"] = "fused"
    """`fused`: the gradients of all rewards from one backward pass. `passes`: one pass for each, to compare with."""
    normalize: bool = True
    """Unit gradients in the quadratic program. false is the paper's ablation, which it reports to fail."""
    metric: Literal["euclidean", "adam"] = "euclidean"
    """What the lengths and angles of gradients are. `euclidean`: the usual ones (the paper). `adam`, an experiment:
    those of the product a^T P^-1 b, where P is the diagonal that AdamW divides by, so that the direction found is good
    for every reward in the step that AdamW makes of it."""
    uniform_after: Annotated[int, Field(ge=0)] | None = None
    """From this step on use equal coefficients (the paper's late uniform stage); null never does."""
    probe_weights: Weights = {}
    """Weights of the weighted-sum direction that is measured beside ours (`ws_...` metrics); 1 where not given.
    They do not influence training."""


class WeightedSumBalance(Section):
    """The usual practice: one scalar reward sum_k w_k R_k, then one advantage."""

    type: Literal["weighted_sum"]
    weights: Weights = {}
    """w_k by reward name; 1 where not given."""


class FixedBalance(Section):
    """Constant coefficients on per-reward advantages."""

    type: Literal["fixed"]
    coefficients: Weights | None = None
    """By reward name, summing to 1; rewards not named get 0. null is 1/K each."""


class GdpoBalance(Section):
    """GDPO: normalise each reward's advantage in its group, sum, normalise the sum over the batch."""

    type: Literal["gdpo"]
    weights: Weights = {}
    """Weights in the sum by reward name; 1 where not given."""


class SingleBalance(Section):
    """Train one reward; the others are scored and logged."""

    type: Literal["single"]
    reward: str
    """Its name."""


class Stage(Section):
    """One stage of a sequential schedule."""

    reward: str
    """The reward trained."""
    steps: PositiveInt
    """For how many optimizer steps."""


class SequentialBalance(Section):
    """A hand-made schedule: one reward after the other. The last stage lasts to the end."""

    type: Literal["sequential"]
    stages: Annotated[list[Stage], Field(min_length=1)]
    """The stages in their order."""


class DropoutBalance(Section):
    """Reward dropout: each step trains a random subset with equal coefficients."""

    type: Literal["dropout"]
    rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Probability that a reward is left out of a step; at least one stays."""


class MinVarianceBalance(Section):
    """MARBLE's quadratic program on the advantages in place of the gradients: the mix of the rewards with the smallest
    variance. No gradient per reward is needed; shows what the gradients add (docs/results.md)."""

    type: Literal["min_variance"]
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.965
    """Smoothing of the coefficients over steps. 0.965 in every step is the paper's 0.7 every 10 steps."""


Balance = Annotated[
    MarbleBalance
    | WeightedSumBalance
    | FixedBalance
    | GdpoBalance
    | SingleBalance
    | SequentialBalance
    | DropoutBalance
    | MinVarianceBalance,
    Field(discriminator="type"),
]


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
    shard_base: bool = False
    """Several processes only: each keeps its share of the frozen base model (FSDP2), for models that do not fit one
    card. See docs/distributed.md."""
    save_every: PositiveInt = 20
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept; at least 2, so that a damaged one can be skipped."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations of the EMA weights during training; null never evaluates."""


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
    """Steps between image grids in samples/; null draws none."""
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
    rewards: Annotated[list[RewardConfig], Field(min_length=1)]
    advantages: AdvantagesConfig = AdvantagesConfig()
    loss: LossConfig = LossConfig()
    balance: Balance = MarbleBalance()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def trained_rewards(self) -> tuple[str, ...]:
        """Names of the K rewards that are trained, in order."""
        return tuple(reward.name for reward in self.rewards if not reward.held_out)

    @property
    def watched_rewards(self) -> dict[str, WatchConfig]:
        """Held-out rewards that are scored during training, by name."""
        return {reward.name: reward.watch for reward in self.rewards if reward.watch is not None}

    def rewards_off(self, step: int) -> list[str]:
        """Trained rewards whose schedule leaves this step out."""
        return [reward.name for reward in self.rewards if not reward.held_out and not reward.on_at(step)]
