"""Hostile clients of `marble rewards serve`: every error is a JSON reply, scores stay right, and SIGTERM ends it soon.

One attack is one server: a request with a known answer, ten hostile ones, the first one again, and SIGTERM while slow
clients hold connections.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from random import Random

import numpy as np
import yaml

from tools.campaign import hostile
from tools.campaign.attack import Attack, Seeded, faults_of
from tools.campaign.process import Started
from tools.campaign.world import World

TOKEN = "a-token-for-the-campaign"
REQUESTS = 10
STOPPING = 8.0
"""Seconds in which a server ends after SIGTERM, whatever its clients do."""
REPLY = 20.0
GROWTH = 300.0
"""MB that hostile requests may cost."""
SIZE = 16


def _batch(images: int = 2) -> tuple[dict[str, object], bytes]:
    header = {
        "shape": [images, SIZE, SIZE, 3],
        "prompts": [{"index": i, "text": "a kite", "source": "things", "metadata": {}} for i in range(images)],
    }
    return header, np.full((images, SIZE, SIZE, 3), 128, dtype=np.uint8).tobytes()


def _request(
    path: str, body: bytes, *, method: str = "POST", token: str | None = TOKEN, length: str | None = None
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {length or len(body)}",
        "Connection: close",
    ]
    lines += [] if token is None else [f"Authorization: Bearer {token}"]
    return "\r\n".join([*lines, "", ""]).encode(errors="replace") + body


def _right() -> bytes:
    header, pixels = _batch()
    return _request("/score/bright", json.dumps(header).encode() + b"\n" + pixels)


def _hostile(rng: Random) -> tuple[str, bytes]:
    """A request that is wrong in one way."""
    header, pixels = _batch()
    line = json.dumps(header).encode()
    other = json.dumps(hostile.tree(rng, header), default=str, skipkeys=True).encode()
    deep = (b"[" * 1_000_000, b"[]," * 5_000_000, b'{"prompts": [' + b"[]," * 1_000_000, b'{"a":' * 100_000)
    prompts = json.dumps({"prompts": header["prompts"] * 50_000}).encode()  # type: ignore[operator]
    requests = (
        ("another header", _request("/score/bright", other + b"\n" + pixels)),
        ("another header", _request("/score/bright", other + b"\n" + pixels)),
        ("too few pixels", _request("/score/bright", line + b"\n" + pixels[:-1])),
        ("no header", _request("/score/bright", pixels)),
        ("random bytes", _request("/score/bright", rng.randbytes(3000))),
        ("deep JSON", _request(rng.choice(("/score/bright", "/applies/bright")), rng.choice(deep))),
        ("too many prompts", _request("/applies/bright", prompts)),
        ("unknown reward", _request(f"/score/{rng.choice(('nobody', '..%2f..', '%00', 'x' * 5000))}", line)),
        ("unknown path", _request(rng.choice(("/", "/score", "/etc/passwd", "/../x", "//", "*")), line)),
        (
            "another method",
            _request("/score/bright", b"", method=rng.choice(("GET", "PUT", "DELETE", "FOO", "CONNECT"))),
        ),
        ("no token", _request("/score/bright", line + b"\n" + pixels, token=None)),
        ("wrong token", _request("/health", b"", method="GET", token=rng.choice(("", "x", TOKEN + "x", "é")))),
        ("no HTTP", rng.randbytes(200) + b"\r\n\r\n"),
        ("a negative length", _request("/score/bright", b"", length=rng.choice(("-1", "abc", "99999999999999999999")))),
        ("huge headers", _request("/score/bright", b"", token="x" * 1_000_000)),
    )
    return rng.choice(requests)


def hostile_clients(world: World, seeded: Seeded) -> Attack:
    rng, folder = seeded.rng, seeded.folder
    (folder / "config.yaml").write_text(yaml.safe_dump({"rewards": [{"name": "bright", "type": "brightness"}]}))
    server = Started(
        ["rewards", "serve", "config.yaml", "--port", "0", "--max-body-mb", "16"],
        folder,
        lambda: os.environ.update(MARBLE_REWARDS_TOKEN=TOKEN),
    )
    faults: list[str] = []
    tried: list[str] = []
    slow: list[socket.socket] = []
    try:
        port = _port(server)
        right = _reply(port, _right())
        before = _megabytes(server.process)
        for _ in range(REQUESTS):
            what, request = _hostile(rng)
            tried.append(what)
            faults += [f"{what}: {fault}" for fault in _wrong_reply(_reply(port, request))]
        if _reply(port, _right()) != right or not right.endswith(b"]}"):
            faults.append(f"other scores after the attacks: {right[-80:]!r}")
        if _megabytes(server.process) - before > GROWTH:
            faults.append(f"{_megabytes(server.process) - before:.0f} MB more")
        slow += [_slow(port, rng) for _ in range(3)]
    except (OSError, TimeoutError) as error:
        faults.append(f"{type(error).__name__}: {error}")
    os.kill(server.process, signal.SIGTERM)
    start = time.monotonic()
    ended = server.wait(4 * STOPPING)
    for client in slow:
        client.close()
    if time.monotonic() - start > STOPPING:
        faults.append(f"ended {time.monotonic() - start:.0f} s after SIGTERM")
    return Attack(", ".join(tried), ended, [*faults, *faults_of(ended)])


def _port(server: Started) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", server.text):
            return int(found[1])
        time.sleep(0.02)
    raise TimeoutError("the server did not start")


def _reply(port: int, request: bytes) -> bytes:
    """Status line, headers and body; empty if the server closed the connection."""
    reply = b""
    with socket.create_connection(("127.0.0.1", port), timeout=REPLY) as client:
        try:
            client.sendall(request)
            while part := client.recv(1 << 16):
                reply += part
        except (BrokenPipeError, ConnectionResetError):  # it has answered, and does not read the rest
            pass
    return b"" if not reply else reply.partition(b"\r\n")[0] + b"\r\n\r\n" + reply.partition(b"\r\n\r\n")[2]


def _wrong_reply(reply: bytes) -> list[str]:
    """A reply is a success, or an error in JSON that is not the server's fault. Closing the connection is one, too."""
    if not reply:
        return []
    status, _, body = reply.partition(b"\r\n\r\n")
    code = int(status.split()[1])
    if code == 200:
        return []
    if not 400 <= code < 500:
        return [f"status {code}"]
    try:
        return [] if isinstance(json.loads(body)["error"], str) and len(body) < 5000 else ["an error without a reason"]
    except (ValueError, KeyError, TypeError):
        return [f"status {code} without JSON"]


def _slow(port: int, rng: Random) -> socket.socket:
    """A connection that sends the beginning of a request, and then nothing."""
    client = socket.create_connection(("127.0.0.1", port), timeout=REPLY)
    request = _request("/score/bright", b"x" * 100, token=rng.choice((TOKEN, None)), length="5000000")
    client.sendall(request[: rng.choice((0, 10, len(request)))])
    return client


def _megabytes(process: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0
