"""The methods by name: what each one changes in the config, and one sentence on it.

Everything that is not named here stays as in the config, so methods differ in nothing else. A method replaces the whole
`balance` section: what the config says there is used by `config` alone.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from marble_rl.config import RunConfig

BASE = "base"
"""The model without training."""
ALONE = "only-"
SCHEDULE = ((800, 1), (300, 2), (200, 1), (200, 2), (100, 3))
"""The paper's hand-made schedule: (steps, reward). Scaled to the budget; see `sequential_stages`."""
LATE = 0.8
"""Where the late uniform stage begins, as a share of the steps. Ours: the paper says "a short stage" only."""
DOUBLED = 0.4
"""Share of the rewards that the paper's weights 1:1:1:2:2 double: the last two of five."""


def specialist(reward: str) -> str:
    """The method that trains on this reward alone."""
    return f"{ALONE}{reward}"


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    about: str
    overrides: tuple[str, ...]
    """`key=value`, as for --set."""
    weights: str = "ema"
    """Which weights of the run are evaluated."""

    @property
    def slug(self) -> str:
        """The name in file names: `weights:1,2` is weights_1_2."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "_", self.name)


def _balance(name: str, about: str, **section: Any) -> Method:
    return Method(name, about, (f"balance={json.dumps(section)}",))


def _marble(name: str, about: str, **changes: Any) -> Method:
    """As in the paper, but for the changes."""
    return _balance(name, about, **{"type": "marble", "refresh_every": 10, "ema_decay": 0.7, **changes})


def _base(config: RunConfig) -> Method:
    # A run of one small step, whose adapter is switched off in the evaluation: so the base model is loaded and sampled
    # exactly as the others are.
    small = ("rollout.group_size=2", "rollout.batch_size=null", "loss.timesteps_per_sample=1", "trainer.steps=1")
    overrides = ('balance={"type": "weighted_sum"}', *small)
    return Method("base", "the model as it is, without training", overrides, weights="base")


def _sequential(config: RunConfig) -> Method:
    stages = sequential_stages(config.trained_rewards, config.trainer.steps)
    section = [{"reward": reward, "steps": steps} for reward, steps in stages]
    about = "one reward after the other, by the paper's hand-made schedule"
    return _balance("sequential", about, type="sequential", stages=section)


def _late_uniform(config: RunConfig) -> Method:
    begin = round(LATE * config.trainer.steps)
    return _marble("marble_late_uniform", "MARBLE, then equal coefficients in the last fifth", uniform_after=begin)


MAKERS: dict[str, Callable[[RunConfig], Method]] = {
    "base": _base,
    "sequential": _sequential,
    "marble_late_uniform": _late_uniform,
}
"""Methods that depend on the config."""

FIXED = {
    method.name: method
    for method in (
        Method("config", "the config's own balance section", ()),
        _balance("weighted_sum", "one scalar reward, the sum of all", type="weighted_sum"),
        _balance("gdpo", "sum of per-reward advantages, normalised over the batch", type="gdpo"),
        _balance("uniform", "per-reward advantages with fixed coefficients 1/K", type="fixed"),
        _balance("dropout", "a random subset of the rewards in each step", type="dropout"),
        _balance("fair", "proportional fairness between one momentum per reward", type="fair"),
        _marble("marble", "MARBLE as in the paper: refreshed every 10 steps, rho 0.7"),
        _marble("marble_every_step", "MARBLE, the QP solved in every step", refresh_every=1),
        _marble("marble_no_norm", "MARBLE on gradients that are not normalised", type="marble_no_norm"),
        _marble("marble_n5", "MARBLE, refreshed every 5 steps", refresh_every=5),
        _marble("marble_n20", "MARBLE, refreshed every 20 steps", refresh_every=20),
        _marble("marble_rho01", "MARBLE, rho 0.1", ema_decay=0.1),
        _marble("marble_rho09", "MARBLE, rho 0.9", ema_decay=0.9),
        _marble("marble_alpha_over_norm", "MARBLE, coefficients over cached gradient norms", apply="alpha_over_norm"),
        _balance("unit_mean", "unit gradients with equal coefficients, no QP", type="unit_mean"),
        _balance(
            "min_variance",
            "the QP on correlations of advantages, no gradient per reward: what MARBLE is where gradients are noise",
            type="min_variance",
        ),
    )
}

JOINT = ("weighted_sum", "sequential", "gdpo", "uniform", "marble", "fair")
VARIANTS = ("marble_alpha_over_norm", "unit_mean", "min_variance", "marble_late_uniform")
ABLATIONS = (
    *("marble_no_norm", "marble_every_step", "marble_n5", "marble_n20", "marble_rho01", "marble_rho09"),
    "dropout",
)


def known_methods(rewards: Sequence[str]) -> list[str]:
    """All names without arguments, in the order of the table."""
    names = [BASE, *map(specialist, rewards), *JOINT, *ABLATIONS, *VARIANTS]
    return [*names, *(name for name in FIXED if name not in names)]


def method_sets(rewards: Sequence[str]) -> dict[str, list[str]]:
    """What a name stands for that is not a method but several."""
    specialists = [*map(specialist, rewards)]
    ablations = [*ABLATIONS, *([tuned_weights(len(rewards))] if len(rewards) > 1 else [])]
    return {
        "specialists": specialists,
        "joint": list(JOINT),
        "ablations": ablations,
        "variants": list(VARIANTS),
        "all": ["base", *specialists, *JOINT, *ablations, *VARIANTS],
    }


def method_named(name: str, config: RunConfig) -> Method:
    """A method without arguments; KeyError for any other name."""
    if name in MAKERS:
        return MAKERS[name](config)
    reward = name.removeprefix(ALONE)
    if name != reward and reward in config.trained_rewards:
        return _balance(name, f"a specialist: trained on {reward} alone", type="single", reward=reward)
    return FIXED[name]


def weighted(weights: Sequence[float], rewards: Sequence[str]) -> Method:
    """`weights:1,2`: a weighted sum with weights chosen by hand."""
    chosen = dict(zip(rewards, weights, strict=True))
    name = "weights:" + ",".join(f"{weight:g}" for weight in weights)
    return _balance(name, "weighted sum with these weights", type="weighted_sum", weights=chosen)


def tuned_weights(count: int) -> str:
    """The paper's 1:1:1:2:2 for any number of rewards: the last two fifths of them, at least one, count double."""
    doubled = max(1, round(DOUBLED * count))
    return "weights:" + ",".join(["1"] * (count - doubled) + ["2"] * doubled)


def sequential_stages(rewards: Sequence[str], steps: int) -> list[tuple[str, int]]:
    """(reward, steps) of the paper's schedule, 800:300:200:200:100 over rewards 1, 2, 1, 2, 3, scaled to the budget.

    Ours, for other K: stages of rewards that are not there fall away, and each reward beyond the third gets a stage
    as long as the third's. Stages that round to no step are left out; the others sum to ``steps``.
    """
    parts = [(share, number) for share, number in SCHEDULE if number <= len(rewards)]
    parts += [(SCHEDULE[-1][0], number) for number in range(4, len(rewards) + 1)]
    total = sum(share for share, _ in parts)
    ends = [round(steps * done / total) for done in itertools.accumulate(share for share, _ in parts)]
    stages = [(rewards[n - 1], end - begin) for (_, n), begin, end in zip(parts, [0, *ends], ends, strict=False)]
    return [(reward, length) for reward, length in stages if length > 0]
