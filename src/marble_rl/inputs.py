"""Everything that can be found wrong with a config before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from marble_rl.config import RunConfig, require_name
from marble_rl.errors import InputError
from marble_rl.models import check_model_path, check_model_settings
from marble_rl.prompts import PromptSet, load_prompts
from marble_rl.rewards.registry import build_rewards
from marble_rl.rewards.scoring import Scorer, applies


@dataclass(frozen=True)
class RunInputs:
    """What a run works with, checked but not loaded."""

    train: PromptSet
    heldout: PromptSet
    scorer: Scorer


def check_inputs(config: RunConfig) -> RunInputs:
    """Read prompts and construct rewards; raise InputError on the first thing that cannot work."""
    check_model_path(config.model.path)
    check_model_settings(config.model.path, config.model.text_length, config.model.guidance, config.rollout.frames)
    rewards = build_rewards(config.rewards)
    train = load_prompts(config.prompts.train, "prompts.train")
    heldout = train if config.prompts.heldout is None else load_prompts(config.prompts.heldout, "prompts.heldout")
    for split in (train, heldout):
        for prompt in split.prompts:
            for name in prompt.rewards or ():
                require_name(name, list(rewards), f"prompt {prompt.text!r} of the source {prompt.source!r}: rewards")
    train.check_groups(config.rollout.groups)
    for name in config.trained_rewards:
        if not any(applies(name, rewards[name], prompt) for prompt in train.prompts):
            raise InputError(
                f"rewards: {name!r} applies to no training prompt, so it could never be learnt; "
                "add prompts that it applies to, name it in a source's `rewards`, or remove it"
            )
    return RunInputs(train, heldout, Scorer(config.rewards, rewards))
