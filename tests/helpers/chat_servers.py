"""A chat server with OpenAI's API on this machine, which answers as a test wants, also badly."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from PIL import Image

from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.remote.chat import ChatError
from marble_rl.rewards.remote.judge import Judge, UnifiedReward
from marble_rl.types import Prompt

Reply = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Does as its server's `reply` says, after taking down the request."""

    server: ChatStub

    def do_GET(self) -> None:
        self.server.listings += 1
        self.server.listing(self, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.times.append(time.monotonic())
        replies = self.server.replies
        replies[min(number, len(replies) - 1)](self, body)

    def send(self, status: int, text: str, **headers: str) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return None


class ChatStub(ThreadingHTTPServer):
    """A server of one model, `eye`. Each request gets the next of `replies`, then the last one for ever."""

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.listings = 0
        self.replies: list[Reply] = [says("Final Score: 3")]
        self.listing: Reply = sends(200, json.dumps({"data": [{"id": "eye"}]}))
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[ChatStub]:
        server = cls()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()
            server.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None  # the client hung up, as some tests make it do


def completion(text: Any, finish: str = "stop") -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]})


def sends(status: int, text: str, **headers: str) -> Reply:
    return lambda handler, body: handler.send(status, text, **headers)


def says(text: Any, finish: str = "stop") -> Reply:
    return sends(200, completion(text, finish))


def hangs(handler: Handler, body: dict[str, Any]) -> None:
    handler.server.closing.wait(5)


def trickles(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.closing.wait(0.02):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def resets(handler: Handler, body: dict[str, Any]) -> None:
    """Closes the connection without a word, as a server that crashed."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def stops_halfway(handler: Handler, body: dict[str, Any]) -> None:
    handler.send(200, completion("Final Score: 3")[:40], Content_Length="400")


def brightness(handler: Handler, body: dict[str, Any]) -> None:
    """An answer that depends on the picture, later for darker ones."""
    red = int(picture(body)[0, 0, 0])
    time.sleep(0.002 * (20 - red))
    handler.send(200, completion(f"red (colour): 1\nFinal Score: 1.{red:03d}"))


def picture(body: dict[str, Any]) -> np.ndarray:
    kind, data = body["messages"][0]["content"][0]["image_url"]["url"].split(";base64,")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert kind == f"data:image/{(image.format or '').lower()}"
    return np.asarray(image)


def question(body: dict[str, Any]) -> str:
    part = body["messages"][0]["content"][1]
    assert part["type"] == "text"
    return str(part["text"])


def judge(url: Any, **params: Any) -> UnifiedReward:
    return UnifiedReward(**{"url": url, "model": "eye", "backoff": 0.001, "timeout": 10.0, "wait": 0, **params})


def batch(count: int, text: str = "a cup") -> RewardBatch:
    """Pictures of plain colour 0, 1, 2, ..."""
    images = np.stack([np.full((8, 8, 3), i, dtype=np.uint8) for i in range(count)])
    return RewardBatch(images, [Prompt(0, text, "s") for _ in range(count)])


def failure(reward: Judge, count: int = 1) -> ChatError:
    with pytest.raises(ChatError) as caught:
        reward.score(batch(count))
    return caught.value
