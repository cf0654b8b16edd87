"""Settings of one reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from marble_rl.section import FOLDER, Name, Section


class WatchConfig(Section):
    """Watch an evaluation-only reward during training, for signs that the trained rewards are exploited."""

    action: Literal["warn", "stop"] = "warn"
    """What to do when it falls while the trained rewards rise: `warn`, or `stop` the run with everything saved."""
    window: Annotated[int, Field(ge=2)] = 10
    """Rollouts in a window. The mean of the newest window is compared with the highest mean of an earlier one."""


class GuardConfig(Section):
    """Keep a reward above a floor instead of raising it (docs/guards.md)."""

    floor: float = 0.0
    """Lowest level that is allowed, relative to the mean score of the model without adapter on the same prompts, in the
    reward's units with higher as better. 0: it must not fall; -0.05: it may fall by 0.05."""
    band: PositiveFloat | None = None
    """How far above the floor the guard begins to act. null: a quarter of the std of the base model's scores within a
    prompt."""
    base_images: Annotated[int, Field(ge=2)] = 2
    """Images of the model without adapter for each prompt, sampled and scored once. The largest number of all guards
    counts."""


class RewardChoice(Section):
    """Which reward, and its parameters."""

    type: str
    """A built-in (`marble rewards list`), or the import path `package.module:name` of a function or class."""
    params: dict[str, Any] = {}
    """Parameters of the reward."""

    @field_validator("params")
    @classmethod
    def _absolute_paths(cls, params: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """While a config is loaded, make the paths in it absolute."""
        folder = (info.context or {}).get(FOLDER)
        if folder is None or "type" not in info.data:  # a wrong type is reported by itself
            return params
        from marble_rl.rewards.core.registry import with_absolute_paths

        return with_absolute_paths(info.data["type"], params, folder)


class RewardConfig(RewardChoice):
    """One reward."""

    name: Name
    """Its name in metrics, tables and elsewhere in this config."""
    held_out: bool = False
    """Evaluation-only: scored in evaluations, never trained on."""
    priority: PositiveFloat = 1.0
    """How much it counts beside the others, for rules that know priorities (`balance.type: fair`); only ratios matter.
    It is not a weight: the scale of the reward does not come into it."""
    guard: GuardConfig | None = None
    """Not an objective but a guard: it must not fall below a floor, and asks for nothing more (`balance.type: fair` or
    `fixed`). `{}`: it must not fall below the model without adapter. null: an objective."""
    optional: bool = False
    """Only for evaluation-only rewards: go on without it where it cannot be loaded (a package is missing, say)."""
    watch: WatchConfig | None = None
    """Only for evaluation-only rewards: also score the training images (`watch/<name>`), and warn or stop when it
    falls while the trained rewards rise; null does not."""
    clip: tuple[float | None, float | None] | None = None
    """[lowest, highest] bounds that scores are clamped to for training, in the reward's own units; null for no bound.
    Logs and evaluations show the scores before clamping."""
    schedule: list[tuple[Annotated[int, Field(ge=0)], PositiveInt | None]] | None = None
    """Pairs [from, until] of steps between which it is trained (until excluded; null: no end). Outside them, training
    does not score it either. null: always trained."""
    device: str | None = None
    """Where its model runs, such as `cpu` or `cuda:1`; under torchrun without a number, because every rank would load a
    copy there. null: what the reward declares, by default the trained model's device."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of its torch operations, by autocast. null: what the reward declares, by default float32."""
    batch_size: PositiveInt | None = None
    """Most images in one call. null: what the reward declares, by default no limit (in training a whole group)."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """Retries after a failure. If all fail, the run stops with everything saved. null: what the reward declares, by
    default 1."""
    backoff: NonNegativeFloat = 0.5
    """Seconds before the first retry, doubled for each one after it."""
    timeout: PositiveFloat | None = 600.0
    """Seconds that one call may take before it counts as failed; null sets no limit."""

    def on_at(self, step: int) -> bool:
        """Whether it is trained at a step, by its schedule."""
        if self.schedule is None:
            return True
        return any(begin <= step and (end is None or step < end) for begin, end in self.schedule)
