"""Reward servers on this machine, good and bad ones, and what to ask them."""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from marble_rl.rewards.builtin.brightness import Brightness
from marble_rl.rewards.core.base import Reward, RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.client import Remote
from marble_rl.rewards.remote.http_server import address, bound_socket, running
from marble_rl.rewards.remote.server import Limits, RewardsApp
from marble_rl.rewards.remote.wire import PROTOCOL, encode_traits
from marble_rl.types import Prompt
from runs import start

WEIGHTLESS = ("brightness", "colour", "jpeg_compressibility")
CPU = torch.device("cpu")
HEALTHY = {"protocol": PROTOCOL, "version": "0", "rewards": {"brightness": encode_traits(Brightness.traits)}}


def pictures(count: int, seed: int = 0, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size + 8, 3), dtype=np.uint8)


def red_batch(count: int, seed: int = 0) -> RewardBatch:
    prompts = [Prompt(i, "a red “cup”", "s", {"bonus": i / 3, "deep": {"list": [1, None]}}) for i in range(count)]
    return RewardBatch(pictures(count, seed), prompts)


def built_in(*kinds: str) -> dict[str, Reward]:
    return build_rewards([RewardConfig(type=kind, name=kind) for kind in kinds])


@contextmanager
def serving(
    rewards: dict[str, Reward] | None = None, token: str | None = None, port: int = 0, **limits: int
) -> Iterator[str]:
    """Address of a server in this process, whose rewards are called once for each request."""
    rewards = built_in(*WEIGHTLESS) if rewards is None else rewards
    scorer = Scorer([RewardConfig(type="x:y", name=name, retries=0) for name in rewards], rewards)
    app = RewardsApp(scorer, Limits(**limits), notice=lambda text: None).asgi(token)
    with bound_socket("127.0.0.1", port) as listener, running(app, listener):
        yield address(listener)


def client(url: str | list[str], reward: str = "brightness", **params: Any) -> Remote:
    """A loaded reward that does not wait long."""
    remote = Remote(**{"url": url, "reward": reward, "backoff": 0.01, "timeout": 5.0, "wait": 0, **params})
    remote.load(CPU)
    return remote


def ask(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
    """A request of the standard library's client: the protocol is not tied to ours."""
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def reply(body: str, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n{body}".encode()


class Faulty(ThreadingHTTPServer):
    """Healthy, except that it answers every request for scores with the same bytes, or never (None)."""

    daemon_threads = True

    def __init__(self, answer: bytes | None, health: dict[str, Any]) -> None:
        self.answer = answer
        self.health = health
        self.asked = 0
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    @classmethod
    @contextmanager
    def running(cls, answer: bytes | None, health: dict[str, Any] = HEALTHY) -> Iterator[Faulty]:
        with cls(answer, health) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield server
            finally:
                server.closing.set()
                server.shutdown()
                thread.join()


class FaultyHandler(BaseHTTPRequestHandler):
    server: Faulty

    def do_GET(self) -> None:
        self.wfile.write(reply(json.dumps(self.server.health)))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        if self.server.answer is None:
            self.server.closing.wait(10)
        else:
            self.wfile.write(self.server.answer)

    def log_message(self, *args: Any) -> None:
        return None


@contextmanager
def server_processes(*commands: list[object]) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """`marble rewards serve` with each command's arguments, and its address; killed in the end if it still runs."""
    with ExitStack() as stack:
        children = [stack.enter_context(start("rewards", "serve", *command, "--port", 0)) for command in commands]
        for child in children:
            stack.callback(child.kill)
        yield [(child, _printed_address(child)) for child in children]


def _printed_address(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = next(line for line in child.stdout if line.startswith("serving"))
    return line.split(" at ")[1].split()[0]
