"""Everything that can be found wrong with a config before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from marble_rl.config import RunConfig, require_name
from marble_rl.models import check_model_path, check_model_settings, known_media
from marble_rl.models.lora_files import check_initial_lora
from marble_rl.prompts import PromptSet, load_prompts
from marble_rl.rewards.registry import build_rewards
from marble_rl.rewards.scoring import Scorer


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
    check_initial_lora(config.lora)
    rewards = build_rewards(config.rewards)
    train = load_prompts(config.prompts.train, "prompts.train")
    heldout = train
    if config.prompts.heldout is not None:
        heldout = load_prompts(config.prompts.heldout, "prompts.heldout", "heldout")
    for split in (train, heldout):
        for prompt in split.prompts:
            for name in prompt.rewards or ():
                require_name(name, list(rewards), f"prompt {prompt.text!r} of the source {prompt.source!r}: rewards")
    train.check_groups(config.rollout.groups)
    scorer = Scorer(config.rewards, rewards)
    for prompt in (*train.prompts, *heldout.prompts):
        for name in rewards:
            scorer[name].applies_to(prompt)  # which may find fault with the prompt's metadata
    scorer.check_applicability(config.trained_rewards, train.prompts)
    media = known_media(config.model.path)
    if media is not None:
        scorer.check_media(media)
    return RunInputs(train, heldout, scorer)
