"""A client of servers with OpenAI's chat-completions API (vLLM, SGLang, hosted ones), on the standard library alone.

A request that brings nothing usable raises `ChatError`, which says whether another attempt makes sense. The key is
read from the environment for each request, and appears in no message.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from marble_rl.errors import InputError

T = TypeVar("T")

LONGEST_PAUSE = 60.0
"""Seconds between two attempts at most, whatever the server asks for."""
LONGEST_LISTING = 15.0
"""Seconds that a GET may take at most. It needs no thinking, so a server that hangs is found early."""
LARGEST_REPLY = 1 << 24
"""Bytes. A score needs a few hundred; more is no chat server."""
EXCERPT = 200
"""Characters of a server's reply in an error message."""


class ChatError(RuntimeError):
    """A request that brought no usable reply. Names the address, what came back, and what to do."""

    row = 0
    """Which picture of its batch it was about."""

    def __init__(self, message: str, *, again: bool, status: int | None = None, pause: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        """Whether another attempt may succeed."""
        self.status = status
        self.pause = pause
        """Seconds that the server asked to wait."""


class _EveryStatus(urllib.request.HTTPErrorProcessor):
    """Hands over every reply as it came. So no redirect is followed: it could carry the key to another server."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response


class ChatClient:
    """Sends JSON, returns JSON. Holds nothing that changes, so any number of threads may use it."""

    def __init__(self, timeout: float, api_key_env: str | None = None) -> None:
        self.timeout = timeout
        self.api_key_env = api_key_env
        self._direct = urllib.request.build_opener(_EveryStatus, urllib.request.ProxyHandler({}))
        self._proxied = urllib.request.build_opener(_EveryStatus)

    def get(self, url: str, path: str) -> Any:
        return self._exchange(f"{url}/{path}", None, min(self.timeout, LONGEST_LISTING))

    def post(self, url: str, path: str, body: dict[str, Any]) -> Any:
        return self._exchange(f"{url}/{path}", json.dumps(body).encode(), self.timeout)

    def excerpt(self, text: str) -> str:
        """The beginning of what a server sent, on one line, without the key."""
        key = self._key()
        plain = " ".join((text.replace(key, "[key]") if key else text).split())
        return plain if len(plain) <= EXCERPT else f"{plain[:EXCERPT]}..."

    def _exchange(self, address: str, data: bytes | None, timeout: float) -> Any:
        status, pause, reply = self._send(address, data, timeout)
        if not 200 <= status < 300:
            raise ChatError(
                f"{address} answered with HTTP {status}: {self.excerpt(reply) or 'no text'}; {self._advice(status)}",
                again=status in (408, 429) or status >= 500,
                status=status,
                pause=pause,
            )
        try:
            return json.loads(reply)
        except (ValueError, RecursionError) as error:
            raise ChatError(
                f"{address} answered with something that is not JSON: {self.excerpt(reply) or 'no text'}; "
                "check that `url` is the base of an OpenAI-compatible API, such as http://localhost:8000/v1",
                again=True,
                status=status,
            ) from error

    def _send(self, address: str, data: bytes | None, timeout: float) -> tuple[int, float, str]:
        """Status, seconds to wait that the server asks for, and text of the reply."""
        request = urllib.request.Request(address, data, self._headers())
        opener = self._direct if _is_loopback(address) else self._proxied
        deadline = time.monotonic() + timeout
        try:
            with opener.open(request, timeout=timeout) as response:
                text = _read(response, deadline).decode(errors="replace")
                return response.status, seconds_asked(response.headers.get("Retry-After")), text
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                problem = f"{address} did not answer within {timeout:g} seconds"
                advice = "raise `timeout`, lower `concurrency`, or see what the server is doing"
            else:
                problem = f"{address} cannot be reached: {type(reason).__name__}: {self.excerpt(str(reason))}"
                advice = "start the server, or correct `url`"
            raise ChatError(f"{problem}; {advice}", again=True) from error

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "marble-rl"}
        key = self._key()
        return {**headers, "Authorization": f"Bearer {key}"} if key else headers

    def _key(self) -> str:
        """Empty where none is used."""
        if self.api_key_env is None:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise InputError(
                f"api_key_env: the environment variable {self.api_key_env!r} is not set; "
                "put the server's key there, or leave api_key_env out if it needs none"
            )
        if not re.fullmatch(r"[!-~]+", key):
            # Checked here because the standard library would quote such a header, and the key, in its own error.
            raise InputError(
                f"api_key_env: the environment variable {self.api_key_env!r} holds white space or characters "
                "that no key has; set it to the key alone"
            )
        return key

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            held = f"the key in the environment variable {self.api_key_env!r}"
            return f"check {held}" if self.api_key_env else "name the environment variable with the key in api_key_env"
        if status == 404:
            return "check `url` (for most servers it ends in /v1) and `model`"
        if status == 429:
            return "lower `concurrency`, or raise `retries` and `backoff`"
        if 300 <= status < 400:
            return "redirects are not followed; give the address it leads to in `url`"
        if status >= 500:
            return "see the server's log"
        return "see the server's reply for what it refuses; it must be a model that takes pictures"


def with_retries(
    attempt: Callable[[int], T], *, retries: int, backoff: float, dice: random.Random, stop: threading.Event
) -> T:
    """Call ``attempt(0)``, ``attempt(1)``, ... until one succeeds, with doubling pauses; not once ``stop`` is set."""
    for number in range(retries + 1):
        try:
            return attempt(number)
        except ChatError as error:
            # Up to half is taken off at random, so that the requests of a batch do not come back all at once.
            pause = max(backoff * 2**number * dice.uniform(0.5, 1.0), error.pause)
            if not error.again or number == retries or stop.wait(min(pause, LONGEST_PAUSE)):
                if number > 0:
                    error.args = (f"{error} (attempt {number + 1} of {retries + 1})",)
                raise
    raise AssertionError("unreachable")


def seconds_asked(retry_after: str | None) -> float:
    """What a Retry-After header asks for, as a number of seconds or as a date; 0 where it cannot be read."""
    if retry_after is None:
        return 0.0
    if re.fullmatch(r"\d{1,9}", retry_after.strip(), re.ASCII):
        return float(retry_after)
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(timezone.utc)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _read(response: Any, deadline: float) -> bytes:
    """The body. The socket's own timeout starts anew with every byte, so a trickle is caught here."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > LARGEST_REPLY:
            raise http.client.HTTPException(f"the reply is longer than {LARGEST_REPLY} bytes")
    return b"".join(parts)


def _is_loopback(address: str) -> bool:
    """A server on this machine is not to be looked for behind the proxy of the environment."""
    host = urlsplit(address).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
