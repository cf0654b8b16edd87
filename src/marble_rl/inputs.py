"""Everything that can be found wrong with a config before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from marble_rl.config import RunConfig, require_name
from marble_rl.models import check_model_path, check_model_settings, check_quantization, known_media, pick_device
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
    if config.model.quantize is not None:
        check_quantization(config.model.quantize, pick_device(config.model.device))
    rewards = build_rewards(config.rewards)
    train = load_prompts(config.prompts.train, "prompts.train")
    heldout = train
    if config.prompts.heldout is not None:
        heldout = load_prompts(config.prompts.heldout, "prompts.heldout", "heldout")
    scorer = Scorer(config.rewards, rewards)
    for split in (train, heldout):
        check_prompts(split, scorer)
    train.check_groups(config.rollout.groups)
    scorer.check_applicability(config.trained_rewards, train.prompts)
    media = known_media(config.model.path)
    if media is not None:
        scorer.check_media(media)
    return RunInputs(train, heldout, scorer)


def check_prompts(split: PromptSet, scorer: Scorer) -> None:
    """Whether the rewards that prompts name are there, and can read what the prompts say."""
    for prompt in split.prompts:
        for name in prompt.rewards or ():
            require_name(name, scorer.names, f"prompt {prompt.text!r} of the source {prompt.source!r}: rewards")
        for name in scorer.names:
            scorer[name].applies_to(prompt)  # which may find fault with the prompt's metadata
