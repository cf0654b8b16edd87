"""Requests to reward servers and chat servers, made with httpx.

httpx is an extra, imported when a client is made: a training without such rewards does not need it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from marble_rl.errors import InputError
from marble_rl.rewards.core.retries import AttemptFailed

if TYPE_CHECKING:
    import httpx

UNREACHABLE = (502, 503, 504)
"""Statuses with which a proxy answers for a server that is down, or a server that is still loading."""
REFUSED = (400, 401, 403, 404, 405, 413, 422)
"""Statuses that a repeated request gets again."""
CHUNK = 1 << 20
"""Bytes of a body that are handed to httpx at a time. It copies what it has not sent yet after every send."""
LARGEST_REPLY = 16 << 20
"""Bytes. Scores need a few hundred; a longer reply is not from a reward or chat server."""


class RequestFailed(AttemptFailed):
    """No complete reply came. The message names the address and the reason."""

    unreachable = True

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass(frozen=True)
class Reply:
    """A complete reply, with any status."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Requests to one server. Any number of threads may use it.

    Every request has its own connection, so none can be stale. Redirects are not followed: they could carry a key to
    another server. ``proxies``: whether the proxies that the environment names are used.
    """

    def __init__(self, url: str, *, proxies: bool) -> None:
        try:
            import httpx
        except ImportError as error:
            raise InputError(f"{error.name} is not installed; run: pip install 'marble-rl[remote]'") from error
        self.url = url
        self._client = httpx.Client(
            headers={"Accept": "application/json", "User-Agent": "marble-rl"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=proxies,
            verify=_system_certificates(),
        )

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        *,
        timeout: float,
        total: bool = False,
    ) -> Reply:
        """Send one request and read the whole reply. ``timeout`` is how long the server may be silent; with ``total``
        also how long the request may take, so that a reply in small pieces does not last for ever."""
        import httpx

        address = f"{self.url}/{path}"
        deadline = time.monotonic() + timeout if total else None
        length = {} if body is None else {"Content-Length": str(len(body)).encode()}
        try:
            with self._client.stream(
                method,
                address,
                content=None if body is None else _chunks(body),
                headers=[(name.encode(), value) for name, value in {**(headers or {}), **length}.items()],
                timeout=timeout,
            ) as response:
                return Reply(response.status_code, response.headers, _read(response, deadline))
        except (httpx.TimeoutException, TimeoutError):
            raise RequestFailed(f"{address} did not answer within {timeout:g} seconds", timed_out=True) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise RequestFailed(f"{address}: {type(error).__name__}: {error}") from error


@cache
def _system_certificates() -> ssl.SSLContext:
    """What the system trusts; httpx's default is a list that comes with a package."""
    return ssl.create_default_context()


def _chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), CHUNK):
        yield body[start : start + CHUNK]


def _read(response: httpx.Response, deadline: float | None) -> bytes:
    parts = []
    size = 0
    for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        if size > LARGEST_REPLY:
            raise OSError(f"the reply is longer than {LARGEST_REPLY} bytes")
    return b"".join(parts)


def is_loopback(host: str) -> bool:
    """Whether the address or name is one that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_secret(variable: str, param: str) -> str:
    """The key or token in an environment variable, empty where it is not set. It must not appear in any message."""
    secret = os.environ.get(variable, "").strip()
    if re.search(r"[\s\x00-\x1f\x7f]", secret):  # refused here, because the error of h11 would quote the header
        raise InputError(
            f"{param}: the environment variable {variable!r} holds white space or control characters; "
            "set it to the key alone"
        )
    return secret


def bearer(secret: str) -> dict[str, bytes]:
    """The header that authenticates a request; none without a secret."""
    return {"Authorization": f"Bearer {secret}".encode()} if secret else {}
