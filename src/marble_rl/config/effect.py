"""Which settings matter to what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

WITHOUT_EFFECT = (
    "trainer.save_every",
    "trainer.keep_checkpoints",
    "trainer.eval_every",
    "prompts.validation*",
    "trainer.shard_base",
    "trainer.deterministic",
    "rollout.batch_size",
    "model.device",
    "rewards.*.retries",
    "rewards.*.backoff",
    "rewards.*.timeout",
    "rewards.*.device",
    "rewards.*.watch*",
    "rewards.*.params.url",  # where a reward is computed, not what it says
    "rewards.*.params.url.*",
    "rewards.*.params.token_env",
    "rewards.*.params.backoff",
    "rewards.*.params.wait",
)
"""Keys that change neither weights nor scores, rounding aside. `logging` as a whole is one more."""


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether a dotted key is one of those."""
    return any(fnmatch(key, pattern) for pattern in patterns)
