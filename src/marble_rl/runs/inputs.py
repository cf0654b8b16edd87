"""The checks of a config that need no model: paths, settings, prompts and rewards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from marble_rl.config import RunConfig
from marble_rl.devices import pick_device
from marble_rl.errors import require_name
from marble_rl.models import check_model_path, check_model_settings, check_quantization, known_media
from marble_rl.models.lora_files import check_initial_lora
from marble_rl.prompts import PromptSet, load_prompts
from marble_rl.prompts.meaning import asked_for
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer


@dataclass(frozen=True)
class RunInputs:
    """Prompts and rewards of a run, checked; the reward models are not loaded yet."""

    train: PromptSet
    heldout: PromptSet
    scorer: Scorer
    remarks: tuple[str, ...] = ()
    """Warnings about settings that are valid but probably a mistake."""


def check_inputs(config: RunConfig) -> RunInputs:
    """Read prompts and construct rewards; raise InputError for the first problem."""
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
    return RunInputs(train, heldout, scorer, (*_silent(config, train, heldout, scorer), *_repeated(train, heldout)))


def _silent(config: RunConfig, train: PromptSet, heldout: PromptSet, scorer: Scorer) -> Iterator[str]:
    """Warn of evaluation-only rewards that apply to no prompt they would score."""
    for reward in config.rewards:
        watched = reward.watch is not None
        prompts = train.prompts if watched else heldout.prompts
        if reward.held_out and not any(scorer[reward.name].applies_to(prompt) for prompt in prompts):
            yield (
                f"rewards: {reward.name!r} applies to no {'training' if watched else 'held-out'} prompt, so it is "
                f"never {'watched' if watched else 'computed'}; a source that names `rewards` must name it too"
            )


def _repeated(train: PromptSet, heldout: PromptSet) -> Iterator[str]:
    """Warn of held-out prompts that ask for the same as a training prompt, in the same words or in others."""
    if heldout is train:
        return
    trained = {words for prompt in train.prompts for words in asked_for(prompt.text, prompt.metadata)}
    for name, prompts in heldout.sources.items():
        repeated = [p for p in prompts if trained.intersection(asked_for(p.text, p.metadata))]
        if repeated:
            yield (
                f"prompts.heldout ({name}): {len(repeated)} of {len(prompts)} prompts ask for what a training prompt "
                f"asks for, such as {repeated[0].text[:80]!r}; scores on them do not show generalisation"
            )


def check_prompts(split: PromptSet, scorer: Scorer) -> None:
    """Refuse prompts that name unknown rewards, or whose metadata a reward cannot read."""
    for prompt in split.prompts:
        for name in prompt.rewards or ():
            require_name(name, scorer.names, f"prompt {prompt.text!r} of the source {prompt.source!r}: rewards")
        for name in scorer.names:
            scorer[name].applies_to(prompt)  # raises on bad metadata
