"""A reward that lives behind `marble rewards serve`, on this machine or on others."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core import checks
from marble_rl.rewards.core.base import RewardBase, RewardBatch, Scores, Traits
from marble_rl.rewards.remote.wire import (
    PROTOCOL,
    TOKEN_VARIABLE,
    Malformed,
    decode_applicability,
    decode_object,
    decode_scores,
    decode_traits,
    encode_batch,
    encode_prompts,
)
from marble_rl.types import Prompt

T = TypeVar("T")

LONGEST_REPLY = 16 << 20
"""Bytes; more is no reply of a reward server."""
LONGEST_PAUSE = 10.0
REST_SECONDS = 30.0
"""A server that failed is asked last for so long, so that a dead one does not cost its timeout in every batch."""


class ServerFailed(Exception):
    """One server did not give a usable answer; the message says which one and why."""


class RemoteFailed(RuntimeError):
    """No server gave a usable answer."""


class Server:
    """Where a server is, and whether it failed of late. A new connection for every request: none can go stale."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.token: str | None = None
        self.rests_until = -math.inf
        self.under_way = 0
        """Requests that it has not answered yet."""
        self._connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host = parts.hostname or ""
        self._port = parts.port
        self._path = parts.path.rstrip("/")
        self._timeout = timeout

    def get(self, path: str) -> dict[str, Any]:
        return self._ask("GET", path, None)

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """The JSON object that the server answers with; ServerFailed for anything else."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}".encode()}
        connection = self._connect(self._host, self._port, timeout=self._timeout)
        try:
            try:
                connection.request(method, self._path + path, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:
                    raise
                # The server may have refused before it read everything: its answer says why.
            response = connection.getresponse()
            status, text, missing = response.status, response.read(LONGEST_REPLY), response.length
        except TimeoutError:
            raise ServerFailed(f"{self.url}: no answer within {self._timeout:g} seconds") from None
        except (OSError, HTTPException, ValueError) as error:
            raise ServerFailed(f"{self.url}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if missing:
            raise ServerFailed(f"{self.url}: the reply lacks {missing} bytes")
        if status != 200:
            raise ServerFailed(f"{self.url}: HTTP {status}: {_reason(status, text)}")
        try:
            return decode_object(text)
        except Malformed as error:
            raise ServerFailed(f"{self.url}: the reply is {error}: {text[:80]!r}") from None


def _reason(status: int, text: bytes) -> str:
    try:
        reason = str(decode_object(text)["error"])
    except (Malformed, KeyError):
        reason = repr(text[:200])
    return f"{reason} (set {TOKEN_VARIABLE}, or the variable that `token_env` names)" if status == 401 else reason


class Remote(RewardBase):
    """A reward served by `marble rewards serve`, on one machine or several.

    ``url``: the server's address, or a list of them; ``reward``: its name there. ``timeout``: seconds that a server
    may be silent. ``retries``: further attempts, each at the next server, after a pause of ``backoff`` seconds that
    doubles every time. ``token_env``: environment variable with the servers' token.

    Whether it applies to a prompt is asked once for each prompt, and answered by the reward itself.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        reward: str,
        timeout: float = 120.0,
        retries: int = 2,
        backoff: float = 0.5,
        token_env: str | None = None,
    ) -> None:
        self.reward = checks.text("reward", reward, "the reward's name on the server")
        self.retries = checks.whole("retries", retries, 0)
        self.backoff = checks.number("backoff", backoff, "0 or more seconds")
        self.token_env = checks.variable_name("token_env", token_env)
        seconds = checks.number("timeout", timeout, "more than 0 seconds", positive=True)
        urls = checks.addresses(url, "http://127.0.0.1:8765", "token_env")
        self._servers = [Server(one, seconds) for one in urls]
        self.traits = self._own_traits(Traits())
        self.repeats = 0
        self._turns = itertools.count()
        self._lock = threading.Lock()
        self._loaded = False
        self._applies: dict[str, bool] = {}

    def load(self, device: torch.device) -> None:
        """Every server must be there, understand us, and have the reward."""
        token = os.environ.get(self.token_env or TOKEN_VARIABLE, "").strip()
        if self.token_env is not None and not token:
            raise InputError(f"token_env: the environment variable {self.token_env!r} is not set; set it to the token")
        for server in self._servers:
            server.token = token or None
            self._attempt([server], self._check)
        self._loaded = True

    def _check(self, server: Server) -> None:
        health = server.get("/health")
        if health.get("protocol") != PROTOCOL:
            raise ServerFailed(
                f"{server.url}: no reward server that this version understands (protocol "
                f"{health.get('protocol')!r}, version {health.get('version')!r}); install the same marble-rl on both"
            )
        served = health.get("rewards")
        if not isinstance(served, dict) or self.reward not in served:
            names = ", ".join(served) if isinstance(served, dict) else "unknown"
            raise ServerFailed(f"{server.url}: does not serve it; served are: {names}")
        self.traits = self._own_traits(decode_traits(served[self.reward]))

    def _own_traits(self, served: Traits) -> Traits:
        """As declared on the server; but a batch for each server may be under way, and retries are made here."""
        return replace(served, concurrency=len(self._servers), retries=0)

    def applies_to(self, prompt: Prompt) -> bool:
        """Before `load` there is nobody to ask: then it may apply to any prompt."""
        if not self._loaded:
            return True
        body = json.dumps({"prompts": encode_prompts([prompt])})
        if body not in self._applies:
            try:
                self._applies[body] = self._attempt(
                    self._in_turn(),
                    lambda server: decode_applicability(server.post(f"/applies/{self.reward}", body.encode()), 1)[0],
                )
            except RemoteFailed as error:
                raise RewardFailed(f"whether it applies to the prompt {prompt.text!r} is unknown: {error}") from error
        return self._applies[body]

    def score(self, batch: RewardBatch) -> Scores:
        body = encode_batch(batch)
        return self._attempt(
            self._in_turn(),
            lambda server: decode_scores(server.post(f"/score/{self.reward}", body), len(batch.prompts)),
        )

    def _in_turn(self) -> list[Server]:
        """The servers in the order in which to try them: another one first every time, busy ones later, those that
        failed last."""
        with self._lock:
            first = next(self._turns) % len(self._servers)
        now = time.monotonic()
        servers = self._servers[first:] + self._servers[:first]
        return sorted(servers, key=lambda server: (server.rests_until > now, server.under_way))

    def _attempt(self, servers: Sequence[Server], ask: Callable[[Server], T]) -> T:
        failures = []
        for attempt in range(self.retries + 1):
            server = servers[attempt % len(servers)]
            if attempt:
                time.sleep(min(self.backoff * 2 ** (attempt - 1), LONGEST_PAUSE))
                with self._lock:
                    self.repeats += 1
            try:
                with self._asking(server):
                    answer = ask(server)
            except ServerFailed as error:
                failures.append(str(error))
            except Malformed as error:
                failures.append(f"{server.url}: {error}")
            else:
                server.rests_until = -math.inf
                return answer
            server.rests_until = time.monotonic() + REST_SECONDS
        reasons = "; ".join(f"{reason} ({n} times)" if n > 1 else reason for reason, n in _counted(failures))
        raise RemoteFailed(f"remote reward {self.reward!r}: {reasons}")

    @contextmanager
    def _asking(self, server: Server) -> Iterator[None]:
        with self._lock:
            server.under_way += 1
        try:
            yield
        finally:
            with self._lock:
                server.under_way -= 1


def _counted(items: Sequence[str]) -> list[tuple[str, int]]:
    return [(item, items.count(item)) for item in dict.fromkeys(items)]
