"""An ASGI app behind a socket, until Ctrl-C: what `marble rewards serve` and `marble rate serve` share.

A client decides what it sends, how slowly, and whether it reads the answer. So everything that waits for a client has a
limit, and a server that is asked to stop waits for its own work only. Every error is JSON: {"error": reason}.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from marble_rl import __version__
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import InputError, Interrupted, Stopped

HEAD_SECONDS = 10.0
"""A connection on which no request begins for so long, however many bytes come, is closed."""
IDLE_SECONDS = 30.0
"""A request whose body makes no progress for so long is refused."""
BODY_SECONDS = 600.0
"""A request whose body is not complete after so long is refused."""
STOP_SECONDS = 10.0
"""Requests that are not answered so long after the server was asked to stop are given up."""
FLUSH_SECONDS = 2.0
"""After that, a client that does not read its answer is cut off."""


class Protocol(H11Protocol):
    """HTTP/1.1 with limits on the time that a client may take."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        self._limit_head()
        super().data_received(data)
        if self._busy():
            self._cancel_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Requests that are there are answered. One that has not come whole is dropped: nobody knows when it will."""
        if self._busy() and self.cycle.more_body:
            self.transport.abort()
        elif self.conn.our_state is h11.ERROR:
            self.transport.close()
        else:
            super().shutdown()
        if not self._busy():
            self.loop.call_later(FLUSH_SECONDS, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the answer was sent before the body came
            self.transport.close()
            return
        body = json.dumps({"error": msg}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _busy(self) -> bool:
        """Whether the head of a request came that is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _limit_head(self) -> None:
        if self._head_timer is None and not self._busy():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if not self._busy():
            self.transport.abort()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


async def read_body(request: Request, limit: int, hint: str = "") -> bytearray:
    """The body of a request. Raises HTTPException where it is larger than ``limit`` bytes, before the rest is read if
    its length is announced, or where it does not come."""
    announced = int(request.headers.get("Content-Length", 0))  # a number: h11 refuses others
    deadline = time.monotonic() + BODY_SECONDS
    body = bytearray()
    stream = request.stream()
    while max(len(body), announced) <= limit:
        left = deadline - time.monotonic()
        try:
            part = await asyncio.wait_for(anext(stream), min(IDLE_SECONDS, left))
        except asyncio.TimeoutError:
            if left < IDLE_SECONDS:
                raise HTTPException(408, f"the body was not complete after {BODY_SECONDS:g} seconds") from None
            raise HTTPException(408, f"nothing of the body came for {IDLE_SECONDS:g} seconds") from None
        if not part:
            return body
        body += part
    size = max(len(body), announced)
    raise HTTPException(413, f"a body of {size} bytes, but this server takes at most {limit}{hint}")


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has the address, but refuses connections until `running` listens on it."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise InputError(f"--host, --port: cannot listen on {host}:{port}: {reason}; give others") from None
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def running(app: ASGIApp, listener: socket.socket, notice: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Answer requests while the context is open. On exit, accept no more connections, close those without a complete
    request, and wait up to STOP_SECONDS until the other requests are answered; KeyboardInterrupt does not wait."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # what clients do wrong is told to them
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=[("Server", f"marble/{__version__}")],
    )
    server = uvicorn.Server(config)
    listener.listen(config.backlog)
    # A daemon, and so are the threads that it starts for the models: nobody has to wait for them.
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait = True
    try:
        yield
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        if wait:
            server.should_exit = True
            thread.join(STOP_SECONDS)
            if thread.is_alive():
                notice(f"requests that were not answered within {STOP_SECONDS:g} seconds are lost")


def serve_until_stopped(app: ASGIApp, listener: socket.socket, banner: str, notice: Callable[[str], None]) -> None:
    """Say ``banner`` once requests are answered, and answer them until a signal. Those under way are finished, as far
    as STOP_SECONDS allow; a second signal does not wait for them."""
    with Interrupts(notice, "finishing the requests under way") as interrupts:
        try:
            with running(app, listener, notice):
                notice(banner)
                while not interrupts.pending():
                    time.sleep(0.1)
        except Stopped as stop:
            raise Interrupted(stop.signum, "stopped at once; requests under way are lost") from None
