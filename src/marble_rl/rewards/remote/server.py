"""`marble rewards serve`: the rewards of a config behind HTTP.

    GET  /health           {"version", "protocol", "rewards": {name: traits}, "max_body_bytes", "max_batch"}
    GET  /metrics          {"rewards": {name: {"calls", "images", "failures", "cached", "seconds", ...}}}
    POST /applies/{name}   {"prompts": [...]}          -> {"applies": [true, ...]}
    POST /score/{name}     a batch, see wire.py        -> {"scores": [...]}

Whatever cannot be answered is an HTTP error with {"error": reason}; there are no made-up scores. A model is called by
one thread at a time. The listening socket is opened after all models are loaded, so a server that answers is ready.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import torch

from marble_rl import __version__
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import InputError, Interrupted, RewardFailed
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.wire import (
    PROTOCOL,
    TOKEN_VARIABLE,
    Malformed,
    decode_batch,
    decode_object,
    decode_prompts,
    encode_traits,
)
from marble_rl.types import Prompt

IDLE_SECONDS = 30.0
"""A client that sends nothing for so long, or takes nothing, is given up."""
DRAIN_SECONDS = 2.0
"""How long a refused body is read and thrown away, so that its sender gets to see why."""
CHUNK = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What one request may hold."""

    max_body_bytes: int = 256 << 20
    max_batch: int = 512


class ServedReward:
    """A loaded reward, called by one thread at a time."""

    def __init__(self, reward: CalledReward) -> None:
        self.called = reward
        self._lock = threading.Lock()

    def applies_to(self, prompts: Sequence[Prompt]) -> list[bool]:
        """The reward's own opinion: what prompts say of its name is the client's business."""
        with self._lock:
            return [self.called.suits(prompt) for prompt in prompts]

    def score(self, batch: RewardBatch) -> list[float | None]:
        with self._lock:
            return self.called.score_unsigned(batch)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class RewardsServer(ThreadingHTTPServer):
    """A thread for every connection, one request in each. Binds at once; listens from `start` on."""

    daemon_threads = True  # `stop` waits for them; a second Ctrl-C does not
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, token: str | None, limits: Limits, notice: Callable[[str], None] = print
    ) -> None:
        self.token = token
        self.limits = limits
        self.notice = notice
        self.rewards: dict[str, ServedReward] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._idle: set[socket.socket] = set()
        self._open_connections = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        super().__init__((host, port), Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def server_bind(self) -> None:
        """As HTTPServer does it, but without asking the name service what this machine is called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def start(self, scorer: Scorer) -> None:
        self.rewards = {name: ServedReward(scorer[name]) for name in scorer.names}
        self.server_activate()
        self._thread.start()

    def stop(self) -> None:
        """Take no more connections, then wait for the requests under way."""
        self.shutdown()
        self.server_close()
        for connection in list(self._idle):  # connected, but asked for nothing: not worth waiting for
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by the other side meanwhile
        with self._changed:
            self._changed.wait_for(lambda: self._open_connections == 0)

    def has_asked(self, connection: Any) -> None:
        self._idle.discard(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Counted before its thread starts, so that `stop` misses none."""
        self._opened(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._closed(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._closed(request)

    def _opened(self, connection: Any) -> None:
        self._idle.add(connection)
        with self._changed:
            self._open_connections += 1

    def _closed(self, connection: Any) -> None:
        self._idle.discard(connection)
        with self._changed:
            self._open_connections -= 1
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is its client's business, and no reason for a traceback."""
        self.notice(f"lost the connection to {client_address[0]}: {sys.exc_info()[1]!r}")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: RewardsServer
    timeout = IDLE_SECONDS
    server_version = f"marble/{__version__}"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._unread = 0

    def parse_request(self) -> bool:
        self.server.has_asked(self.connection)
        return super().parse_request()

    def do_GET(self) -> None:
        self._answer({"/health": self._health, "/metrics": self._metrics})

    def do_POST(self) -> None:
        _, _, name = self.path.lstrip("/").partition("/")
        self._answer({f"/applies/{name}": lambda: self._applies(name), f"/score/{name}": lambda: self._score(name)})

    def _answer(self, routes: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
        try:
            self._unread = self._body_length()
            self._check_token()
            if self.path not in routes:
                raise Refused(
                    HTTPStatus.NOT_FOUND,
                    f"no {self.command} {self.path} here; there are GET /health, GET /metrics, "
                    "POST /applies/NAME and POST /score/NAME",
                )
            reply, status = routes[self.path](), HTTPStatus.OK
        except Refused as error:
            reply, status = {"error": str(error)}, error.status
        except Malformed as error:
            reply, status = {"error": str(error)}, HTTPStatus.BAD_REQUEST
        except (RewardFailed, InputError) as error:
            self.server.notice(str(error))
            reply, status = {"error": str(error)}, HTTPStatus.INTERNAL_SERVER_ERROR
        self._send(reply, status)

    def _send(self, reply: dict[str, Any], status: HTTPStatus) -> None:
        body = json.dumps(reply, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)
        self._discard_unread()

    def _discard_unread(self) -> None:
        """Closing with bytes unread would reset the connection, and the client might never see the answer."""
        if self._unread:
            self.wfile.flush()
            give_up = time.monotonic() + DRAIN_SECONDS
            self.connection.settimeout(DRAIN_SECONDS)
            while self._unread > 0 and time.monotonic() < give_up:
                self._unread -= len(self.rfile.read(min(CHUNK, self._unread))) or self._unread

    def _check_token(self) -> None:
        if self.server.token is None:
            return
        # http.server reads headers as latin-1; undone, these are the bytes that were sent.
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the bearer token is missing or wrong")

    def _body_length(self) -> int:
        if self.command != "POST":
            return 0
        length = self.headers.get("Content-Length")
        if length is None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length")
        if not (length.isascii() and length.isdigit()) or len(length) > 18:
            raise Refused(HTTPStatus.BAD_REQUEST, "the Content-Length is no number of bytes")
        return int(length)

    def _body(self) -> bytes:
        length, limit = self._unread, self.server.limits.max_body_bytes
        if length > limit:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a body of {length} bytes, but this server takes at most {limit} (--max-body-mb)",
            )
        self._unread = 0
        body = self.rfile.read(length)
        if len(body) < length:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body ends after {len(body)} of {length} bytes")
        return body

    def _served(self, name: str) -> ServedReward:
        if name not in self.server.rewards:
            raise Refused(
                HTTPStatus.NOT_FOUND, f"no reward {name[:100]!r} here; served are {', '.join(self.server.rewards)}"
            )
        return self.server.rewards[name]

    def _health(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "protocol": PROTOCOL,
            "rewards": {name: encode_traits(served.called.traits) for name, served in self.server.rewards.items()},
            **asdict(self.server.limits),
        }

    def _metrics(self) -> dict[str, Any]:
        return {"rewards": {name: asdict(served.called.counts) for name, served in self.server.rewards.items()}}

    def _applies(self, name: str) -> dict[str, Any]:
        served = self._served(name)
        return {"applies": served.applies_to(decode_prompts(decode_object(self._body()).get("prompts")))}

    def _score(self, name: str) -> dict[str, Any]:
        served = self._served(name)
        batch = decode_batch(self._body(), self.server.limits.max_batch)
        for prompt, applies in zip(batch.prompts, served.applies_to(batch.prompts), strict=True):
            if not applies:
                raise Refused(HTTPStatus.BAD_REQUEST, f"reward {name!r} does not apply to the prompt {prompt.text!r}")
        return {"scores": served.score(batch)}

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line for every batch; /metrics counts them, and failures are told."""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def required_token(host: str) -> str | None:
    """The token that clients must show. Only a server that other machines cannot reach may do without."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token and not is_loopback(host):
        raise InputError(
            f"--host: {host!r} can be reached from other machines, so clients must show a token; "
            f"set the environment variable {TOKEN_VARIABLE}, here and for the clients, or serve on 127.0.0.1"
        )
    return token or None


def serve(
    configs: Sequence[RewardConfig],
    *,
    host: str,
    port: int,
    limits: Limits,
    device: torch.device,
    notice: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests under way and return."""
    token = required_token(host)
    # Trying again, and how long to wait, is the client's business.
    served = [config.model_copy(update={"retries": 0, "timeout": None}) for config in configs]
    rewards = build_rewards(served)
    try:
        server = RewardsServer(host, port, token, limits, notice)
    except OSError as error:
        raise InputError(
            f"--host, --port: cannot listen on {host}:{port}: {error.strerror or error}; give others"
        ) from None
    scorer = Scorer(served, rewards)
    with server:
        for remark in scorer.load(device):
            notice(remark)
        server.start(scorer)
        _serve_until_interrupted(server)


def _serve_until_interrupted(server: RewardsServer) -> None:
    with Interrupts(server.notice, "finishing the requests under way") as interrupts:
        try:
            server.notice(f"serving {', '.join(server.rewards)} at {server.url} (Ctrl-C stops)")
            while not interrupts.pending():
                time.sleep(0.1)
            server.stop()
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "stopped at once; requests under way are lost") from None
