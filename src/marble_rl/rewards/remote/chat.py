"""A client of servers with OpenAI's chat-completions API: vLLM, SGLang, hosted ones.

A request without a usable reply raises `ChatError`, which says whether another attempt makes sense. The key is read
from the environment for each request, and appears in no message.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from marble_rl.errors import InputError, shortened
from marble_rl.rewards.core.retries import AttemptFailed
from marble_rl.rewards.remote.http_client import (
    UNREACHABLE,
    HttpClient,
    Reply,
    RequestFailed,
    bearer,
    is_loopback,
    read_secret,
)

LISTING_TIMEOUT = 15.0
"""Seconds that a GET may take at most. It runs no model, so a server that hangs is noticed early."""
EXCERPT = 200
"""Characters of a server's reply in an error message."""


class ChatError(AttemptFailed):
    """A request without a usable reply. The message names the address, the reply and the fix."""

    row = 0
    """Index of its picture in the batch."""

    def __init__(
        self,
        message: str,
        *,
        final: bool = False,
        unreachable: bool = False,
        status: int | None = None,
        pause: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.final = final
        self.unreachable = unreachable
        self.status = status
        self.pause = pause


class ChatServer:
    """Sends JSON to one server and returns JSON. Any number of threads may use it."""

    def __init__(self, url: str, timeout: float, api_key_env: str | None = None) -> None:
        self.url = url
        self.timeout = timeout
        self.api_key_env = api_key_env
        self._http = HttpClient(url, proxies=not is_loopback(urlsplit(url).hostname or ""))

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None, min(self.timeout, LISTING_TIMEOUT))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, json.dumps(body).encode(), self.timeout)

    def excerpt(self, text: str) -> str:
        """The beginning of what a server sent, on one line, without the key."""
        key = self._key()
        return shortened(" ".join((text.replace(key, "[key]") if key else text).split()), EXCERPT)

    def _ask(self, method: str, path: str, body: bytes | None, timeout: float) -> Any:
        headers = {"Content-Type": b"application/json", **bearer(self._key())}
        try:
            reply = self._http.send(method, path, body, headers, timeout=timeout, total=True)
        except RequestFailed as error:
            advice = (
                "raise `timeout`, lower `concurrency`, or see what the server is doing"
                if error.timed_out
                else "check that the server runs, and that `url` is its address"
            )
            raise ChatError(f"{self.excerpt(str(error))}; {advice}", unreachable=True) from None
        return self._decoded(f"{self.url}/{path}", reply)

    def _decoded(self, address: str, reply: Reply) -> Any:
        status, text = reply.status, reply.body.decode(errors="replace")
        shown = self.excerpt(text) or "no text"
        if not 200 <= status < 300:
            raise ChatError(
                f"{address} answered with HTTP {status}: {shown}; {self._advice(status)}",
                final=status not in (408, 429) and status < 500,
                unreachable=status in UNREACHABLE,
                status=status,
                pause=retry_after(reply.headers.get("Retry-After")),
            )
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ChatError(
                f"{address} answered with something that is not JSON: {shown}; "
                "check that `url` is the base of an OpenAI-compatible API, such as http://localhost:8000/v1",
                status=status,
            ) from None

    def _key(self) -> str:
        """Empty where none is used."""
        if self.api_key_env is None:
            return ""
        key = read_secret(self.api_key_env, "api_key_env")
        if not key:
            raise InputError(
                f"api_key_env: the environment variable {self.api_key_env!r} is not set; "
                "put the server's key there, or leave api_key_env out if it needs none"
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
        return "the server's reply says what it refuses; the model must take pictures"


def retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, as a number or as a date; 0 where it cannot be read."""
    if header is None:
        return 0.0
    if re.fullmatch(r"\d{1,9}", header.strip(), re.ASCII):
        return float(header)
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(timezone.utc)).total_seconds())
    except (TypeError, ValueError):
        return 0.0
