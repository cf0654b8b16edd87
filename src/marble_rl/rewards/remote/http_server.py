"""An ASGI app behind a socket, until Ctrl-C: what `marble rewards serve` and `marble rate serve` share."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from marble_rl import __version__
from marble_rl.distributed.interrupts import Interrupts
from marble_rl.errors import InputError, Interrupted


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
def running(app: ASGIApp, listener: socket.socket) -> Iterator[None]:
    """Answer requests while the context is open. On exit, accept no more connections, close those without a request,
    and wait until the other requests are answered; KeyboardInterrupt does not wait."""
    config = uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=[("Server", f"marble/{__version__}")],
    )
    server = uvicorn.Server(config)
    listener.listen(config.backlog)
    # A daemon, and so are the threads that it starts for the models: a second Ctrl-C does not wait for them.
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
            thread.join()


def serve_until_stopped(app: ASGIApp, listener: socket.socket, banner: str, notice: Callable[[str], None]) -> None:
    """Say ``banner`` once requests are answered, and answer them until SIGINT or SIGTERM. Those under way are
    finished; a second Ctrl-C does not wait for them."""
    with Interrupts(notice, "finishing the requests under way") as interrupts:
        try:
            with running(app, listener):
                notice(banner)
                while not interrupts.pending():
                    time.sleep(0.1)
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "stopped at once; requests under way are lost") from None
