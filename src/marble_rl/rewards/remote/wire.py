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
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, FailFast, Field, FiniteFloat, PositiveInt, ValidationError

from marble_rl.errors import count_of
from marble_rl.rewards.core.base import Images, RewardBatch, Traits
from marble_rl.section import first_mistake
from marble_rl.types import Media, Prompt

PROTOCOL = 2
"""Increased with every change after which a server and a client of different versions would misread each other."""
TOKEN_VARIABLE = "MARBLE_REWARDS_TOKEN"
SERVED_TRAITS = ("higher_is_better", "deterministic", "media")


class Malformed(ValueError):
    """A request or reply that is not in the format above."""


class PromptsRequest(BaseModel):
    """Body of `POST /applies/{name}`."""

    prompts: Annotated[list[Prompt], FailFast()]  # one mistake is reported, not a list as long as the request


class BatchHeader(PromptsRequest):
    """The first line of the body of `POST /score/{name}`."""

    shape: Annotated[list[PositiveInt], Field(min_length=4, max_length=5)]


class AppliesReply(BaseModel):
    applies: list[bool]


class ScoresReply(BaseModel):
    scores: list[FiniteFloat | None]


class HealthReply(BaseModel):
    """Of any version: the client compares the protocol first."""

    protocol: Any = None
    version: Any = None
    rewards: dict[str, Any] = {}


class ServedTraits(BaseModel):
    """What a reward on a server declares, in the reply to `GET /health`."""

    range: tuple[FiniteFloat | None, FiniteFloat | None]
    higher_is_better: bool
    deterministic: bool
    media: Media


class ErrorReply(BaseModel):
    error: str


MessageT = TypeVar("MessageT", bound=BaseModel)


def decode(kind: type[MessageT], text: bytes | bytearray) -> MessageT:
    """The message of that kind in a JSON text; anything else is Malformed."""
    try:
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise Malformed(f"{first_mistake(error)}, in {bytes(text[:80])!r}") from None


def encode_prompts(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    return [
        {"index": p.index, "text": p.text, "source": p.source, "metadata": dict(p.metadata)}
        | ({} if p.rewards is None else {"rewards": sorted(p.rewards)})
        for p in prompts
    ]


def encode_batch(batch: RewardBatch) -> bytes:
    header = {"shape": list(batch.images.shape), "prompts": encode_prompts(batch.prompts)}
    return b"".join((json.dumps(header).encode(), b"\n", np.ascontiguousarray(batch.images).data))


def json_limit(max_batch: int) -> int:
    """Most bytes of JSON in a request of up to ``max_batch`` prompts with their metadata."""
    return 2**20 + 16 * 2**10 * max_batch


def decode_prompts(body: bytearray, max_batch: int) -> list[Prompt]:
    """The prompts in the body of `POST /applies/{name}`. Raises Malformed, with the reason."""
    prompts = _decode_bounded(PromptsRequest, body, max_batch).prompts
    if len(prompts) > max_batch:
        raise Malformed(f"{len(prompts)} prompts, but this server takes at most {max_batch} at once (--max-batch)")
    return prompts


def _decode_bounded(kind: type[MessageT], text: bytes | bytearray, max_batch: int) -> MessageT:
    """As `decode`, for the text of a client that is not trusted: refused before it is parsed, if the result would take
    much more memory than a batch needs. A value in memory can take 30 times its text (`[]`)."""
    if len(text) > json_limit(max_batch):
        raise Malformed(f"more than {json_limit(max_batch)} bytes of JSON (the limit of {max_batch} prompts)")
    values = sum(text.count(sign) for sign in (b",", b"[", b"{"))
    most = 1000 + 500 * max_batch
    if values > most:
        raise Malformed(f"JSON of about {values} values, but this server takes at most {most}")
    return decode(kind, text)


def decode_batch(body: bytearray, max_batch: int) -> RewardBatch:
    """The batch in a request's body, whose pixels are not copied. Raises Malformed, with the reason."""
    end = body.find(b"\n", 0, json_limit(max_batch) + 1)
    line = body[:end] if end >= 0 else body[: json_limit(max_batch) + 1]
    header = _decode_bounded(BatchHeader, line, max_batch)
    pixels = memoryview(body)[len(line) + 1 :]
    shape, prompts = header.shape, header.prompts
    if shape[-1] != 3:
        raise Malformed(f"images must have 3 channels, not {shape[-1]}")
    if shape[0] > max_batch:
        raise Malformed(f"{shape[0]} images, but this server takes at most {max_batch} at once (--max-batch)")
    if len(prompts) != shape[0]:
        raise Malformed(f"{count_of(len(prompts), 'prompt')} for {count_of(shape[0], 'image')}")
    if len(pixels) != math.prod(shape):
        raise Malformed(f"{len(pixels)} bytes of pixels, but the shape {shape} needs {math.prod(shape)}")
    images: Images = np.frombuffer(pixels, dtype=np.uint8).reshape(shape)
    return RewardBatch(images, prompts)


def decode_scores(reply: bytes, count: int) -> list[float | None]:
    """The scores in a server's reply: as many finite numbers, or null, as there were images; or Malformed."""
    scores = decode(ScoresReply, reply).scores
    if len(scores) != count:
        raise Malformed(f"{count_of(len(scores), 'score')} for {count_of(count, 'image')}")
    return scores


def decode_applicability(reply: bytes, count: int) -> list[bool]:
    applies = decode(AppliesReply, reply).applies
    if len(applies) != count:
        raise Malformed(f"{count_of(len(applies), 'answer')} for {count_of(count, 'prompt')}")
    return applies


def encode_traits(traits: Traits) -> dict[str, Any]:
    """What a reward declares, as far as clients need it."""
    low, high = (bound if math.isfinite(bound) else None for bound in traits.range)
    return {"range": [low, high], **{name: getattr(traits, name) for name in SERVED_TRAITS}}


def decode_traits(served: Any) -> Traits:
    """What a reward on a server declares, from the reply to `GET /health`."""
    try:
        declared = ServedTraits.model_validate_json(json.dumps(served), strict=True)
    except ValidationError as error:
        raise Malformed(
            f"the server does not describe its reward as this version expects: {first_mistake(error)}"
        ) from None
    low, high = declared.range
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    return Traits(range=bounds, **{name: getattr(declared, name) for name in SERVED_TRAITS})
