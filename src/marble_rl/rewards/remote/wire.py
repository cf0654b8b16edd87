"""The format of requests to reward servers and of their replies.

A batch is one line of JSON, then the pixels as they are in memory:

    {"shape": [B, H, W, 3], "prompts": [{"index": 0, "text": "a kite", "source": "things", "metadata": {}}, ...]}\n
    B * H * W * 3 bytes

For videos the shape is [B, F, H, W, 3]. Scores come back as JSON numbers in Python's shortest exact form, so that no
bit of a float64 is lost; null where the reward does not apply to the image. Nothing that is received is unpickled.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from marble_rl.rewards.core.base import Images, RewardBatch, Traits
from marble_rl.types import Prompt

PROTOCOL = 2
"""Increased with every change after which a server and a client of different versions would misread each other."""
TOKEN_VARIABLE = "MARBLE_REWARDS_TOKEN"
SERVED_TRAITS = ("higher_is_better", "deterministic", "media")
PROMPT_FIELDS = {"index": int, "text": str, "source": str, "metadata": dict}


class Malformed(ValueError):
    """A request or reply that is not in the format above."""


def encode_prompts(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    return [
        {"index": p.index, "text": p.text, "source": p.source, "metadata": dict(p.metadata)}
        | ({} if p.rewards is None else {"rewards": sorted(p.rewards)})
        for p in prompts
    ]


def encode_batch(batch: RewardBatch) -> bytes:
    header = {"shape": list(batch.images.shape), "prompts": encode_prompts(batch.prompts)}
    return json.dumps(header).encode() + b"\n" + batch.images.tobytes()


def decode_prompts(rows: Any) -> list[Prompt]:
    if not isinstance(rows, list):
        raise Malformed("`prompts` must be a list")
    return [_decode_prompt(row, f"prompts.{i}") for i, row in enumerate(rows)]


def _decode_prompt(row: Any, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise Malformed(f"{where} must be an object")
    for field, kind in PROMPT_FIELDS.items():
        if not isinstance(row.get(field), kind):
            raise Malformed(f"{where}.{field} must be of type {kind.__name__}")
    rewards = row.get("rewards")
    if rewards is not None and not (isinstance(rewards, list) and all(isinstance(name, str) for name in rewards)):
        raise Malformed(f"{where}.rewards must be a list of names")
    names = None if rewards is None else frozenset(rewards)
    return Prompt(row["index"], row["text"], row["source"], row["metadata"], names)


def decode_batch(body: bytes, max_batch: int) -> RewardBatch:
    """The batch in a request's body. Raises Malformed, with the reason."""
    line, _, pixels = body.partition(b"\n")
    header = decode_object(line)
    shape = _decode_shape(header.get("shape"))
    if shape[0] > max_batch:
        raise Malformed(f"{shape[0]} images, but this server takes at most {max_batch} at once (--max-batch)")
    prompts = decode_prompts(header.get("prompts"))
    if len(prompts) != shape[0]:
        raise Malformed(f"{len(prompts)} prompts for {shape[0]} images")
    if len(pixels) != math.prod(shape):
        raise Malformed(f"{len(pixels)} bytes of pixels, but the shape {shape} needs {math.prod(shape)}")
    # A copy, because a view of bytes cannot be written to, and a reward's images in process can.
    images: Images = np.frombuffer(pixels, dtype=np.uint8).reshape(shape).copy()
    return RewardBatch(images, prompts)


def _decode_shape(shape: Any) -> list[int]:
    if not (isinstance(shape, list) and len(shape) in (4, 5) and all(type(n) is int and n > 0 for n in shape)):
        raise Malformed("`shape` must be [images, height, width, 3] or [videos, frames, height, width, 3], none 0")
    if shape[-1] != 3:
        raise Malformed(f"images must have 3 channels, not {shape[-1]}")
    return shape


def decode_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Malformed(f"not a JSON object: {text[:80]!r}")
    return value


def decode_scores(reply: dict[str, Any], count: int) -> list[float | None]:
    """The scores in a server's reply: as many finite numbers, or null, as there were images; or Malformed."""
    scores = reply.get("scores")
    if not isinstance(scores, list):
        raise Malformed("the reply has no list of `scores`")
    if len(scores) != count:
        raise Malformed(f"{len(scores)} scores for {count} images")
    for row, score in enumerate(scores):
        if score is not None and (type(score) not in (int, float) or not abs(score) <= sys.float_info.max):
            raise Malformed(f"score {row} is {str(score)[:40]!r}, not a finite number")
    return [None if score is None else float(score) for score in scores]


def encode_traits(traits: Traits) -> dict[str, Any]:
    """What a reward declares, as far as clients need it."""
    low, high = (bound if math.isfinite(bound) else None for bound in traits.range)
    return {"range": [low, high], **{name: getattr(traits, name) for name in SERVED_TRAITS}}


def decode_traits(served: Any) -> Traits:
    """What a reward on a server declares, from the reply to `GET /health`."""
    try:
        low, high = served["range"]
        bounds = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
        return Traits(range=bounds, **{name: served[name] for name in SERVED_TRAITS})
    except (TypeError, KeyError, ValueError):
        raise Malformed("the server does not describe its reward as this version expects") from None


def decode_applicability(reply: dict[str, Any], count: int) -> list[bool]:
    answers = reply.get("applies")
    if not (isinstance(answers, list) and len(answers) == count and all(type(a) is bool for a in answers)):
        raise Malformed(f"the reply has no list `applies` of {count} true or false")
    return answers
