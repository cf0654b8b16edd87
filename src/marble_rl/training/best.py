"""Which checkpoint is the best: one score of the EMA weights on the validation prompts.

    gain_k = mean over prompts of (score_k - base_k) / s_k
    score  = mean over the objectives of gain_k

base_k is the score of the model without adapter on the same prompt and noise, s_k the standard deviation of base_k over
prompts. So every objective counts alike, whatever its scale. A reward whose base scores do not differ between prompts
has no such unit and is left out. Weights under which a guard's mean difference to the base model lies below its floor
are never the best. Of equal scores the earlier counts.

The highest of several noisy scores flatters itself, so it is never reported: results come from the held-out prompts,
which `prompts.validation` may not repeat.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from marble_rl.config import RunConfig
from marble_rl.evaluation.evaluate import Evaluation
from marble_rl.types import Prompt

PerPrompt = dict[str, list[float | None]]
"""By reward: the score of each prompt, None where the reward does not apply"""


@dataclass(frozen=True)
class Judged:
    """The weights after some step, against the base model."""

    score: float
    gains: Mapping[str, float]
    """By objective, in stds of the base model's scores over prompts"""
    below: tuple[str, ...] = ()
    """Guards below their floor"""


@dataclass
class Best:
    """The best evaluation so far; part of a run's state, the same on all ranks."""

    made_with: str
    """Digest of all that scores depend on beside the weights"""
    base: PerPrompt | None = None
    """The base model's scores, once they are known"""
    step: int | None = None
    """Updates done; None as long as no evaluation counts"""
    score: float | None = None
    gains: Mapping[str, float] = field(default_factory=dict)

    def judge(self, config: RunConfig, now: Evaluation) -> Judged | None:
        """None where no objective has a unit to measure its gain in."""
        assert self.base is not None
        scores = per_prompt(now)
        pairs = {name: _pairs(self.base[name], scores[name]) for name in config.trained_rewards}
        spreads = {name: _spread(self.base[name]) for name in config.objectives}
        gains = {
            name: _mean_difference(pairs[name]) / spread for name, spread in spreads.items() if spread and pairs[name]
        }
        if not gains:
            return None
        levels = {name: _mean_difference(pairs[name]) for name in config.guards if pairs[name]}
        below = tuple(name for name, level in levels.items() if level < config.guards[name].floor)
        return Judged(statistics.fmean(gains.values()), gains, below)

    def observe(self, step: int, judged: Judged) -> bool:
        """Whether these are the best weights so far."""
        if judged.below or (self.score is not None and judged.score <= self.score):
            return False
        self.step, self.score, self.gains = step, judged.score, judged.gains
        return True

    def state_dict(self) -> dict[str, Any]:
        """Small JSON values, for checkpoints."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Whether the state is of the same validation: scores of other prompts, or scored otherwise, do not compare."""
        if state["made_with"] != self.made_with:
            return False
        self.base, self.step, self.score, self.gains = (state[key] for key in ("base", "step", "score", "gains"))
        return True


def validation_digest(config: RunConfig, prompts: Sequence[Prompt]) -> str:
    """Of all that the scores of a validation depend on beside the weights."""
    rewards = [
        [reward.name, reward.type, reward.params, None if reward.guard is None else reward.guard.floor]
        for reward in config.rewards
        if not reward.held_out
    ]
    size = config.rollout.model_dump(include={"height", "width", "frames"})
    asked = [[prompt.source, prompt.text, sorted(prompt.rewards or ())] for prompt in prompts]
    made_with = [config.evaluation.model_dump(exclude={"batch_size"}), size, rewards, asked]
    return hashlib.sha256(json.dumps(made_with, sort_keys=True, default=str).encode()).hexdigest()


def per_prompt(evaluation: Evaluation) -> PerPrompt:
    """Mean over the images of each prompt."""
    means = {name: evaluation.per_prompt(name).tolist() for name in evaluation.table.names}
    return {name: [x if math.isfinite(x) else None for x in column] for name, column in means.items()}


def _pairs(base: Sequence[float | None], now: Sequence[float | None]) -> list[tuple[float, float]]:
    """Of the prompts with a score under both."""
    return [(b, n) for b, n in zip(base, now, strict=True) if b is not None and n is not None]


def _mean_difference(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(now - base for base, now in pairs)


def _spread(scores: Sequence[float | None]) -> float:
    """Sample standard deviation over prompts; 0 where it says nothing."""
    known = [score for score in scores if score is not None]
    return statistics.stdev(known) if len(known) > 1 else 0.0
