"""Settings of sampling and of the old policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from marble_rl.section import Fraction, Section


class OldPolicyConfig(Section):
    """After each rollout: old <- d old + (1 - d) trained, d = min(uprate * max(step - flat, 0), uphold)."""

    flat: Annotated[int, Field(ge=0)] = 0
    """Steps during which d is 0: the old policy becomes a copy of the trained one after each rollout."""
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
    """Sampling from the old policy, without classifier-free guidance: DiffusionNFT does not need it."""

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
    """Frames of a video (for Wan 4 n + 1); null takes the model's own. An error with an image model."""
    batch_size: PositiveInt | None = None
    """Images sampled at a time; null samples one group at a time. More than a group is faster for a small model: fewer
    passes for the same samples."""
    updates: PositiveInt = 1
    """Optimizer updates that the groups of a rollout are divided among; must divide groups."""
    epochs: PositiveInt = 1
    """How often a rollout is trained on, with new noise and noise levels each time. 2 takes half as many rollouts for
    the same number of updates, which learn less, most of all from rare prompts (docs/tunnel.md)."""
    old_policy: Literal["on_policy", "default", "slow"] | OldPolicyConfig = "default"
    """How the old policy, which samples, follows the trained one: a mapping with flat, uprate and uphold, or a preset.
    Presets (flat, uprate, uphold): `on_policy` (0, 0, 0), `default` (0, 0.001, 0.5), `slow` (75, 0.0075, 0.999)."""

    @property
    def old_policy_decay(self) -> OldPolicyConfig:
        return OLD_POLICY_PRESETS[self.old_policy] if isinstance(self.old_policy, str) else self.old_policy

    @property
    def steps_each(self) -> int:
        """Optimizer steps between two rollouts."""
        return self.updates * self.epochs

    @property
    def images_at_once(self) -> int:
        return self.batch_size or self.group_size
