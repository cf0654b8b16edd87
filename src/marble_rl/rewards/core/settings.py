"""Settings of one reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from marble_rl.section import FOLDER, Name, Section


class WatchConfig(Section):
    """Watching an evaluation-only reward during training, for signs that the trained ones are being exploited."""

    action: Literal["warn", "stop"] = "warn"
    """What to do when it falls while the trained rewards rise: `warn`, or `stop` the run with everything saved."""
    window: Annotated[int, Field(ge=2)] = 10
    """Rollouts whose mean is compared with that of as many earlier ones."""


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
    optional: bool = False
    """Only for evaluation-only rewards: go on without it where it cannot be loaded (a package is missing, say)."""
    watch: WatchConfig | None = None
    """Only for evaluation-only rewards: score it on the training images too (`watch/<name>`), and sound the alarm when
    it falls while the trained rewards rise; null does not."""
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
    """Seconds that one call may take; null sets no limit."""

    def on_at(self, step: int) -> bool:
        """Whether its schedule covers a step."""
        if self.schedule is None:
            return True
        return any(begin <= step and (end is None or step < end) for begin, end in self.schedule)
