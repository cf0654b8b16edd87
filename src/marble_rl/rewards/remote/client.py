"""A reward behind `marble rewards serve`, on this machine or on others."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from marble_rl.errors import InputError, RewardFailed, shortened
from marble_rl.rewards.core.base import RewardBase, RewardBatch, Scores, Traits
from marble_rl.rewards.core.retries import AllAttemptsFailed, AttemptFailed, Outage, RetryPolicy
from marble_rl.rewards.remote.http_client import REFUSED, UNREACHABLE, HttpClient, Reply, bearer, read_secret
from marble_rl.rewards.remote.settings import RemoteParams
from marble_rl.rewards.remote.wire import (
    PROTOCOL,
    TOKEN_VARIABLE,
    ErrorReply,
    HealthReply,
    Malformed,
    decode,
    decode_applicability,
    decode_scores,
    decode_traits,
    encode_batch,
    encode_prompts,
)
from marble_rl.types import Prompt

T = TypeVar("T")

LONGEST_PAUSE = 10.0
"""Seconds between two attempts at most. Another server may be free, so it is shorter than for other rewards."""
LONGEST_REASON = 300
"""Characters of a server's error in a message, so that there is room for the errors of several servers."""
REST_SECONDS = 30.0
"""A server that failed is asked last for so long, so that a dead one does not cost its timeout in every batch."""


class ServerFailed(AttemptFailed):
    """One server did not give a usable answer; the message says which one and why."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.final = status in REFUSED
        self.unreachable = status in UNREACHABLE


class RemoteFailed(RuntimeError):
    """No server gave a usable answer."""


class Server:
    """One server, and when it last failed."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.token = ""
        self.rests_until = -math.inf
        self.under_way = 0
        """Requests that it has not answered yet."""
        self._timeout = timeout
        self._http = HttpClient(url, proxies=False)

    def ask(self, method: str, path: str, read: Callable[[bytes], T], body: bytes | None = None) -> T:
        """What ``read`` makes of the server's answer; AttemptFailed if it is not in the format."""
        reply = self._http.send(method, path, body, bearer(self.token), timeout=self._timeout)
        if self.token:  # a server may send it back, and messages quote its reply
            reply = replace(reply, body=reply.body.replace(self.token.encode(), b"[token]"))
        if reply.status != 200:
            raise ServerFailed(f"{self.url}: HTTP {reply.status}: {_reason(reply)}", reply.status)
        try:
            return read(reply.body)
        except Malformed as error:
            raise ServerFailed(f"{self.url}: {error}") from None


def _reason(reply: Reply) -> str:
    try:
        reason = shortened(decode(ErrorReply, reply.body).error, LONGEST_REASON)
    except Malformed:
        reason = repr(reply.body[:200])
    advice = f" (set {TOKEN_VARIABLE}, or the variable that `token_env` names)"
    return reason + advice if reply.status == 401 else reason


class Remote(RewardBase):
    """A reward served by `marble rewards serve`, on one machine or several.

    Takes the params of `RemoteParams` as keyword arguments. Whether it applies to a prompt is asked once for each
    prompt, and answered by the reward itself.
    """

    Params = RemoteParams

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.reward = self.params.reward
        self._servers = [Server(url, self.params.timeout) for url in self.params.url]
        self._policy = RetryPolicy(self.params.retries, self.params.backoff, self._count_retry, LONGEST_PAUSE)
        self.patience = self.params.wait
        self._outage = Outage(f"reward {self.reward!r}", self.params.wait)
        self.traits = self._own_traits(Traits())
        self.repeats = 0
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._loaded = False
        self._applies: dict[str, bool] = {}

    def load(self, device: torch.device) -> None:
        """Check that every server answers, has the same protocol, and serves the reward."""
        variable = self.params.token_env
        token = read_secret(variable or TOKEN_VARIABLE, "token_env")
        if variable is not None and not token:
            raise InputError(f"token_env: the environment variable {variable!r} is not set; set it to the token")
        for server in self._servers:
            server.token = token
            traits = self._attempt([server], lambda server: server.ask("GET", "health", self._served_traits))
            self.traits = self._own_traits(traits)
        self._loaded = True

    def _served_traits(self, reply: bytes) -> Traits:
        health = decode(HealthReply, reply)
        if health.protocol != PROTOCOL:
            raise Malformed(
                f"expected a reward server with protocol {PROTOCOL}, got protocol {health.protocol!r}, "
                f"version {health.version!r}; install the same marble-rl on both"
            )
        if self.reward not in health.rewards:
            raise Malformed(f"does not serve {self.reward!r}; served are: {', '.join(health.rewards)}")
        return decode_traits(health.rewards[self.reward])

    def _own_traits(self, served: Traits) -> Traits:
        """As declared on the server, except that each server may have a batch under way, and retries are made here."""
        return replace(served, concurrency=len(self._servers), retries=0)

    def applies_to(self, prompt: Prompt) -> bool:
        """Before `load` no server is asked, and it counts as applicable to any prompt."""
        if not self._loaded:
            return True
        body = json.dumps({"prompts": encode_prompts([prompt])})
        if body not in self._applies:
            try:
                answers = self._post("applies", body.encode(), lambda reply: decode_applicability(reply, 1))
            except RemoteFailed as error:
                raise RewardFailed(f"whether it applies to the prompt {prompt.text!r} is unknown: {error}") from error
            self._applies[body] = answers[0]
        return self._applies[body]

    def score(self, batch: RewardBatch) -> Scores:
        return self._post("score", encode_batch(batch), lambda reply: decode_scores(reply, len(batch.prompts)))

    def _post(self, action: str, body: bytes, read: Callable[[bytes], T]) -> T:
        path = f"{action}/{self.reward}"
        return self._attempt(self._in_turn(), lambda server: server.ask("POST", path, read, body))

    def _in_turn(self) -> list[Server]:
        """The servers in the order in which to try them: another one first every time, busy ones later, and those
        that failed in the last seconds at the end."""
        with self._lock:
            first = next(self._turns) % len(self._servers)
        now = time.monotonic()
        servers = self._servers[first:] + self._servers[:first]
        return sorted(servers, key=lambda server: (server.rests_until > now, server.under_way))

    def _attempt(self, servers: Sequence[Server], ask: Callable[[Server], T]) -> T:
        """Ask one server after the other until one answers. Before the training starts, a server that cannot be
        reached is more likely a wrong address than one that restarts, and is not waited for."""

        refused = set()

        def attempt(number: int) -> T:
            server = servers[number % len(servers)]
            try:
                with self._under_way(server):
                    return ask(server)
            except AttemptFailed as error:
                if error.final:
                    refused.add(server.url)
                    error.final = len(refused) == len({other.url for other in servers})  # another one may accept it
                raise

        try:
            return self._policy.call(attempt, outage=self._outage if self._loaded else None)
        except AllAttemptsFailed as error:
            message = f"remote reward {self.reward!r}: no usable answer in {error.attempts}: {error.reasons()}"
            raise RemoteFailed(message) from error.failures[-1]

    @contextmanager
    def _under_way(self, server: Server) -> Iterator[None]:
        """Count a request to the server, and note whether it failed."""
        with self._lock:
            server.under_way += 1
        try:
            yield
            server.rests_until = -math.inf
        except AttemptFailed:
            server.rests_until = time.monotonic() + REST_SECONDS
            raise
        finally:
            with self._lock:
                server.under_way -= 1

    def _count_retry(self) -> None:
        with self._lock:
            self.repeats += 1
