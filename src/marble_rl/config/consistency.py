"""What one setting of a config says about another."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from marble_rl.balancing.base import Balancer, Guarding
from marble_rl.balancing.registry import RULES
from marble_rl.config.run import RunConfig
from marble_rl.errors import InputError, require_name
from marble_rl.rewards.core.settings import RewardConfig


def check_consistency(config: RunConfig) -> None:
    """Raises InputError where settings that are good alone do not go together."""
    _check_rewards(config)
    rule = RULES.part_of(config.balance)
    rule.check_complete()
    with RULES.blaming(config.balance.type, InputError):
        rule.check(config.balance, config.trained_rewards)
    _check_priorities(config, rule)
    _check_guards(config, rule)
    names = [reward.name for reward in config.rewards]
    for split in ("train", "heldout", "validation"):
        for i, source in enumerate(getattr(config.prompts, split) or []):
            for name in source.rewards or []:
                require_name(name, names, f"prompts.{split}.{i}.rewards")

    rollout = config.rollout
    if rollout.groups % rollout.updates:
        raise InputError(
            f"rollout.updates: {rollout.updates} does not divide rollout.groups={rollout.groups}; "
            f"use a divisor of {rollout.groups}"
        )


def _check_rewards(config: RunConfig) -> None:
    names = [reward.name for reward in config.rewards]
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"rewards: the name {name!r} is used twice; names must differ")
    for i, reward in enumerate(config.rewards):
        if reward.optional and not reward.held_out:
            raise InputError(
                f"rewards.{i} ({reward.name}).optional: true, but the reward is trained on; "
                "only evaluation-only rewards may be left out. Remove it, or set held_out: true"
            )
        _check_hacking_guards(reward, f"rewards.{i} ({reward.name})")
        _check_finite(reward.params, f"rewards.{i} ({reward.name}).params")
    trained = config.trained_rewards
    if not trained:
        raise InputError("rewards: all of them are held_out; at least one must be trained")
    if not config.objectives:
        raise InputError(
            "rewards: all trained ones are guards, so there is nothing to improve; remove `guard` from at least one"
        )
    for step in _changing_steps(config):
        if set(config.objectives) <= set(config.rewards_off(step)):
            raise InputError(f"rewards: no reward's `schedule` covers step {step}; leave one on in every step")


def _changing_steps(config: RunConfig) -> list[int]:
    """The steps in which a reward may be switched on or off, ascending: the first rollout at or after an end of a
    schedule's pair. Not every step: there may be a billion."""
    ends = {end for reward in config.rewards for pair in reward.schedule or [] for end in pair if end is not None}
    each = config.rollout.steps_each
    firsts = {-(-end // each) * each for end in {0, *ends}}
    return sorted(step for step in firsts if step < config.trainer.steps)


def _check_priorities(config: RunConfig, rule: type[Balancer]) -> None:
    for i, reward in enumerate(config.rewards):
        if reward.priority == 1.0:
            continue
        where = f"rewards.{i} ({reward.name}).priority: {reward.priority:g}"
        if reward.held_out:
            raise InputError(f"{where}, but the reward is held out and never trained on; remove it")
        if not rule.uses_priorities:
            raise InputError(
                f"{where}, but balance.type: {config.balance.type} does not use priorities; remove it, or set "
                "balance.type: fair"
            )


def _check_guards(config: RunConfig, rule: type[Balancer]) -> None:
    for i, reward in enumerate(config.rewards):
        if reward.guard is None:
            continue
        where = f"rewards.{i} ({reward.name}).guard"
        if reward.priority != 1.0:
            given = f"priority: {reward.priority:g}"
            raise InputError(f"{where}: a guard has no priority, but {given} is given; remove one of the two")
        if reward.schedule is not None:
            raise InputError(f"{where}: a guard holds in every step, but it has a schedule; remove one of the two")
        if not issubclass(rule, Guarding):
            raise InputError(
                f"{where}: balance.type: {config.balance.type} does not support guards; set balance.type: fair (or "
                "fixed), or set held_out: true in place of `guard`"
            )
    if config.guards and issubclass(rule, Guarding):
        rule.check_guards(config.balance, list(config.guards))


def _check_finite(value: Any, key: str) -> None:
    """A run keeps its config as JSON, which has no other numbers: they would come back as null."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(item, f"{key}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_finite(item, f"{key}.{i}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{key}: {value} is not a finite number; leave the key out, or give a number")


def _check_hacking_guards(reward: RewardConfig, where: str) -> None:
    if reward.watch is not None and not reward.held_out:
        raise InputError(f"{where}.watch: only evaluation-only rewards are watched; remove it, or set held_out: true")
    if reward.guard is not None and reward.held_out:
        raise InputError(
            f"{where}.guard: a guard is trained on, but held_out: true is given; remove `held_out` (and `watch`), or "
            "remove `guard`"
        )
    if reward.held_out and (reward.clip is not None or reward.schedule is not None):
        raise InputError(f"{where}: is held out, so clip and schedule have nothing to act on; remove them")
    if reward.clip is not None:
        low, high = reward.clip
        if (low is None and high is None) or (low is not None and high is not None and low >= high):
            raise InputError(
                f"{where}.clip: {list(reward.clip)} bounds nothing; give [lowest, highest], one may be null"
            )
    if reward.schedule == []:
        raise InputError(f"{where}.schedule: is empty, so it would never be trained; set held_out: true instead")
    for begin, end in reward.schedule or []:
        if end is not None and begin >= end:
            raise InputError(f"{where}.schedule: [{begin}, {end}] holds no step; give [from, until] with from < until")
