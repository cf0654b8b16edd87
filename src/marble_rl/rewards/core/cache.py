"""A cache for the scores of whole batches.

The key is the content of a whole batch, not of one image: the last bits of a model's score may depend on the other
images of the batch. So a run with a cache gives the same result as one without, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import threading

from marble_rl.rewards.core.base import RewardBatch, Scores
from marble_rl.rewards.remote.wire import encode_prompts

BATCHES = 4096
"""Most batches kept; the least recently used are dropped."""


class ScoreCache:
    """Scores of the batches that one reward scored last."""

    def __init__(self, limit: int = BATCHES) -> None:
        self._limit = limit
        self._scores: dict[bytes, Scores] = {}
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Scores | None:
        with self._lock:
            scores = self._scores.pop(key, None)
            if scores is not None:
                self._scores[key] = scores  # now the most recently used, so last
            return scores

    def put(self, key: bytes, scores: Scores) -> None:
        with self._lock:
            self._scores[key] = scores
            if len(self._scores) > self._limit:
                del self._scores[next(iter(self._scores))]


def content_key(batch: RewardBatch) -> bytes:
    """A 16-byte hash of everything that a reward can see of a batch."""
    content = hashlib.blake2b(digest_size=16)
    content.update(json.dumps([batch.images.shape, encode_prompts(batch.prompts)], sort_keys=True).encode())
    content.update(batch.images.tobytes())
    return content.digest()
