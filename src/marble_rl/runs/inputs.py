"""The checks of a config that need no model: paths, settings, prompts and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from marble_rl.config import RunConfig
from marble_rl.devices import pick_device
from marble_rl.errors import InputError, require_name
from marble_rl.models import check_model_path, check_model_settings, check_quantization, known_media
from marble_rl.models.lora_files import check_initial_lora
from marble_rl.prompts import PromptSet, load_prompts
from marble_rl.prompts.meaning import asked_for
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer

UNVALIDATED = "validation prompt, so the best checkpoint would be chosen without it"


@dataclass(frozen=True)
class RunInputs:
    """Prompts and rewards of a run, checked; the reward models are not loaded yet."""

    train: PromptSet
    heldout: PromptSet
    scorer: Scorer
    remarks: tuple[str, ...] = ()
    """Warnings about settings that are valid but probably a mistake."""
    validation: PromptSet | None = None
    """What the best checkpoint is chosen on, apart from the held-out prompts; None: it is not chosen."""

    def check_applicability(self, trained: Sequence[str]) -> None:
        """Refuse a trained reward that applies to no prompt that it is needed for."""
        self.scorer.check_applicability(trained, self.train.prompts)
        if self.validation is not None:
            self.scorer.check_applicability(trained, self.validation.prompts, UNVALIDATED)


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
    validation = _validation(config, heldout)
    scorer = Scorer(config.rewards, rewards)
    for split in (train, heldout, *([] if validation is None else [validation])):
        check_prompts(split, scorer)
    train.check_groups(config.rollout.groups)
    remarks = (
        *_silent(config, train, heldout, scorer),
        *_repeated(train, heldout, "prompts.heldout"),
        *([] if validation is None else _repeated(train, validation, "prompts.validation")),
    )
    inputs = RunInputs(train, heldout, scorer, remarks, validation)
    inputs.check_applicability(config.trained_rewards)
    media = known_media(config.model.path)
    if media is not None:
        scorer.check_media(media)
    return inputs


def _validation(config: RunConfig, heldout: PromptSet) -> PromptSet | None:
    """Refused where it repeats a prompt that `marble evaluate` reports on: what a checkpoint is chosen by cannot also
    judge it."""
    if config.prompts.validation is None:
        return None
    reported = {words for prompt in heldout.prompts for words in asked_for(prompt.text, prompt.metadata)}
    validation = load_prompts(config.prompts.validation, "prompts.validation", "heldout", frozenset(reported))
    for name, prompts in validation.sources.items():
        for prompt in prompts:
            if reported.intersection(asked_for(prompt.text, prompt.metadata)):
                which = "held-out" if config.prompts.heldout else "training"
                raise InputError(
                    f"prompts.validation ({name}): {prompt.text[:80]!r} asks for what a {which} prompt asks for, which "
                    "marble evaluate reports on; the best checkpoint must be chosen on other prompts. Remove it here "
                    "or there"
                )
    return validation


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


def _repeated(train: PromptSet, heldout: PromptSet, key: str) -> Iterator[str]:
    """Warn of held-out prompts that ask for the same as a training prompt, in the same words or in others."""
    if heldout is train:
        return
    trained = {words for prompt in train.prompts for words in asked_for(prompt.text, prompt.metadata)}
    for name, prompts in heldout.sources.items():
        repeated = [p for p in prompts if trained.intersection(asked_for(p.text, p.metadata))]
        if repeated:
            yield (
                f"{key} ({name}): {len(repeated)} of {len(prompts)} prompts ask for what a training prompt "
                f"asks for, such as {repeated[0].text[:80]!r}; scores on them do not show generalisation"
            )


def check_prompts(split: PromptSet, scorer: Scorer) -> None:
    """Refuse prompts that name unknown rewards, or whose metadata a reward cannot read."""
    for prompt in split.prompts:
        for name in prompt.rewards or ():
            require_name(name, scorer.names, f"prompt {prompt.text!r} of the source {prompt.source!r}: rewards")
        for name in scorer.names:
            scorer[name].applies_to(prompt)  # raises on bad metadata
