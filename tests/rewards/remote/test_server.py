"""`marble rewards serve`, over real sockets: what it scores, what it refuses, and how it stops."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
import yaml

from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote import http_server
from marble_rl.rewards.remote.client import RemoteFailed
from marble_rl.rewards.remote.http_client import is_loopback
from marble_rl.rewards.remote.wire import PROTOCOL, TOKEN_VARIABLE, encode_batch
from marble_rl.types import Prompt
from reward_servers import WEIGHTLESS, ask, built_in, client, pictures, red_batch, server_processes, serving
from rewards_for_tests import After, Sleeping
from runs import marble


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_the_reward_sees_what_it_would_see_in_process() -> None:
    class Recorder(RewardBase):
        traits = Traits(writes_images=True)

        def score(self, batch: RewardBatch) -> list[float]:
            self.batch = batch
            batch.images[0] = 0
            return [0.0] * len(batch.prompts)

    recorder = Recorder()
    prompts = [Prompt(7, "né\n", "s", {"a": [1.5, {"b": None}]}), Prompt(8, "", "t", rewards=frozenset({"x", "y"}))]
    with serving({"r": recorder}) as url:
        client(url, "r").score(RewardBatch(pictures(2), prompts))
    assert recorder.batch.prompts == prompts
    assert recorder.batch.images[1].tobytes() == pictures(2)[1].tobytes()


def test_four_clients_at_once_get_their_own_scores_from_one_thread_at_a_time() -> None:
    class Watched(RewardBase):
        inside = most = 0

        def score(self, batch: RewardBatch) -> list[float]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.002)
            self.inside -= 1
            return list(built_in("brightness")["brightness"].score(batch))

    watched = Watched()
    batches = [red_batch(1 + seed % 5, seed) for seed in range(40)]
    with serving({"r": watched}) as url, ThreadPoolExecutor(4) as pool:
        got = list(pool.map(client(url, "r").score, batches))
        counts = ask(url, "GET", "/metrics")[1]["rewards"]["r"]
    assert got == [built_in("brightness")["brightness"].score(batch) for batch in batches]
    assert watched.most == 1
    assert (counts["calls"], counts["images"], counts["failures"]) == (40, sum(len(b.prompts) for b in batches), 0)
    assert counts["seconds"] >= 40 * 0.002


@pytest.mark.parametrize(
    ("what", "says"), [("raise", "fell over"), ("nan", "returned nan"), ("short", "1 score for 2")]
)
def test_a_reward_that_fails_on_the_server_is_http_500_with_the_reason(what: str, says: str) -> None:
    with serving({"odd": After(what, calls=1)}) as url:
        remote = client(url, "odd", retries=0)
        assert len(remote.score(red_batch(2))) == 2
        status, answer = ask(url, "POST", "/score/odd", encode_batch(red_batch(2)))
        assert status == 500
        assert list(answer) == ["error"]
        assert "reward 'odd' failed" in answer["error"]
        assert says in answer["error"]
        scorer = Scorer([RewardConfig(type="x:y", name="mine", retries=1)], {"mine": remote})
        with pytest.raises(RewardFailed, match=r"reward 'mine' failed after 2 attempts .*HTTP 500.*'odd'"):
            scorer.score(["mine"], torch.from_numpy(pictures(2)), red_batch(2).prompts, batch_size=2)
        assert ask(url, "GET", "/metrics")[1]["rewards"]["odd"]["failures"] == 3


def test_health_names_rewards_and_limits() -> None:
    with serving(max_batch=3, max_body_bytes=1000) as url:
        status, health = ask(url, "GET", "/health")
    assert status == 200
    assert list(health["rewards"]) == list(WEIGHTLESS)
    assert health["rewards"]["jpeg_compressibility"]["range"] == [None, 0.0]
    assert (health["protocol"], health["max_batch"], health["max_body_bytes"]) == (PROTOCOL, 3, 1000)


def test_a_token_is_asked_for_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    good = encode_batch(red_batch(2))
    with serving(token="sésame") as url:
        for path in ("/health", "/metrics"):
            assert ask(url, "GET", path)[0] == 401
        for path in ("/score/brightness", "/applies/brightness", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer sesame"}, {"Authorization": "sésame"}):
                assert ask(url, "POST", path, good, **headers)[0] == 401
        with pytest.raises(RemoteFailed, match=f"HTTP 401.*{TOKEN_VARIABLE}"):
            client(url, retries=0)
        monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
        with pytest.raises(RemoteFailed, match="HTTP 401"):
            client(url, retries=0)
        monkeypatch.setenv("MINE", "sésame\n")
        assert len(client(url, token_env="MINE").score(red_batch(2))) == 2
        with pytest.raises(InputError, match="'OTHER' is not set"):
            client(url, token_env="OTHER")


def test_limits_and_malformed_requests() -> None:
    good = encode_batch(red_batch(2))
    header, _, pixels = good.partition(b"\n")
    one_prompt = json.dumps({**json.loads(header), "prompts": json.loads(header)["prompts"][:1]}).encode()
    cases = [
        (encode_batch(red_batch(4)), 400, "4 images, but this server takes at most 3"),
        (encode_batch(red_batch(40)), 413, "takes at most 10000"),
        (bytes(20_000_000), 413, "takes at most 10000"),
        (b"", 400, "Invalid JSON"),
        (b"\x80\x04pickle", 400, "Invalid JSON"),
        (good[:-1], 400, "bytes of pixels"),
        (good + b"x", 400, "bytes of pixels"),
        (one_prompt + b"\n" + pixels, 400, "1 prompt for 2 images"),
        (header.replace(b"[2, ", b"[0, ") + b"\n", 400, "shape.0: Input should be greater than 0"),
        (header.replace(b'"text"', b'"txt"') + b"\n" + pixels, 400, "prompts.0.text"),
    ]
    with serving(max_batch=3, max_body_bytes=10_000) as url:
        for body, status, reason in cases:
            got, answer = ask(url, "POST", "/score/brightness", body)
            assert (got, reason in answer["error"]) == (status, True), answer
        assert (
            "no reward 'brightnes' here; served are brightness, "
            in ask(url, "POST", "/score/brightnes", good)[1]["error"]
        )
        assert ask(url, "POST", "/", good) == (404, {"error": "POST /: Not Found"})
        assert ask(url, "GET", "/score/brightness")[0] == 405
        with pytest.raises(RemoteFailed, match="HTTP 413"):
            client(url, retries=0).score(red_batch(40))
        with pytest.raises(RemoteFailed, match="HTTP 400: 4 images"):
            client(url, retries=0).score(red_batch(4))
        assert ask(url, "GET", "/metrics")[1]["rewards"]["brightness"]["calls"] == 0
        assert ask(url, "POST", "/score/brightness", good)[0] == 200


def test_a_request_cut_short_is_not_scored() -> None:
    body = encode_batch(red_batch(2))
    with serving() as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            start_line = f"POST /score/brightness HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(start_line.encode() + body[:-10])
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(4096)
        assert ask(url, "GET", "/metrics")[1]["rewards"]["brightness"]["calls"] == 0


def test_a_body_in_chunks_has_the_same_limits() -> None:
    """Without a Content-Length the size is known only when it came."""

    def post(url: str, body: bytes) -> httpx.Response:
        return httpx.post(f"{url}/score/brightness", content=iter([body[:1000], body[1000:]]), trust_env=False)

    with serving(max_body_bytes=10_000) as url:
        small, large = (post(url, encode_batch(red_batch(count))) for count in (2, 40))
    assert small.json() == {"scores": built_in("brightness")["brightness"].score(red_batch(2))}
    assert large.status_code == 413
    assert "takes at most 10000" in large.json()["error"]


def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.2)
    with serving() as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(b"POST /score/brightness HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert response.status == 408
            assert "nothing of the body came for 0.2 seconds" in json.loads(response.read())["error"]


def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret\nX-Other: header")
    outcome = marble("rewards", "serve", served_config(tmp_path / "c.yaml"), "--port", 0)
    assert outcome.code == 2
    assert f"{TOKEN_VARIABLE!r} holds white space" in outcome.err
    assert "secret" not in outcome.err


@pytest.mark.parametrize("package", ["starlette.applications", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("server", "http_server"):
        monkeypatch.delitem(sys.modules, f"marble_rl.rewards.remote.{module}")
    outcome = marble("rewards", "serve", served_config(tmp_path / "c.yaml"), "--port", 0)
    assert outcome.code == 2
    assert f"needs {package}; run: pip install 'marble-rl[serve]'" in outcome.err


def served_config(path: Path, seconds: float = 1.5) -> Path:
    """A config that has a `rewards` section only."""
    rewards = [
        {"name": "bright", "type": "brightness"},
        {"name": "slow", "type": "rewards_for_tests:slow", "params": {"seconds": seconds}},
    ]
    path.write_text(yaml.safe_dump({"rewards": rewards}))
    return path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu-box", ""])
def test_start_is_refused_without_a_token_where_others_can_reach_it(tmp_path: Path, host: str) -> None:
    outcome = marble("rewards", "serve", served_config(tmp_path / "c.yaml"), "--host", host, "--port", 0)
    assert outcome.code == 2
    assert TOKEN_VARIABLE in outcome.err
    assert "--host" in outcome.err
    assert not is_loopback(host)


def test_start_is_refused_on_bad_arguments(tmp_path: Path) -> None:
    config = served_config(tmp_path / "c.yaml")
    unknown = marble("rewards", "serve", config, "--only", "brigt")
    assert (unknown.code, "Did you mean 'bright'?" in unknown.err) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = marble("rewards", "serve", config, "--port", port)
    assert outcome.code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in outcome.err


def wait_until_busy(url: str, reward: str) -> None:
    deadline = time.monotonic() + 20
    while ask(url, "GET", "/metrics")[1]["rewards"][reward]["calls"] == 0:
        assert time.monotonic() < deadline, "the request never came"
        time.sleep(0.01)


@pytest.mark.full
def test_sigterm_finishes_the_request_under_way_and_a_kill_moves_it_to_the_other_server(tmp_path: Path) -> None:
    config = served_config(tmp_path / "c.yaml")
    batch = red_batch(3)
    expected = [float(image[..., 0].mean()) / 255 for image in batch.images]
    with (
        server_processes([config, "--only", "slow"], [config]) as ((killed, first), (stopped, second)),
        ThreadPoolExecutor(1) as pool,
    ):
        served = [list(ask(url, "GET", "/health")[1]["rewards"]) for url in (first, second)]
        assert served == [["slow"], ["bright", "slow"]]
        answer = pool.submit(client([first, second], "slow").score, batch)
        wait_until_busy(first, "slow")
        killed.kill()
        host, port = second.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):  # without a request: the server closes it
            wait_until_busy(second, "slow")
            stopped.send_signal(signal.SIGTERM)
            assert answer.result(timeout=10) == expected
            assert stopped.wait(timeout=20) == 0
        with pytest.raises(ConnectionRefusedError):
            ask(second, "GET", "/health")


@pytest.mark.full
def test_a_second_interrupt_does_not_wait_for_requests(tmp_path: Path) -> None:
    config = served_config(tmp_path / "c.yaml", seconds=300)
    with server_processes([config, "--only", "slow"]) as ((server, url),), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client(url, "slow", retries=0, timeout=60).score, red_batch(1))
        wait_until_busy(url, "slow")
        server.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(timeout=2)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=10) == 128 + signal.SIGINT
        with pytest.raises(RemoteFailed):
            answer.result(timeout=10)


# What clients may do to it


def connection_to(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("token", [None, "sesame"])
@pytest.mark.parametrize(
    "sent",
    [
        b"POST /score/bri",
        head("/score/brightness", 1000) + b"half of the bo",
        head("/nothing", 1000) + b"half of the bo",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20_000,
    ],
    ids=["half a head", "half a body", "half a body that nobody wants", "answers are not read"],
)
def test_a_slow_client_does_not_keep_the_server_from_stopping(sent: bytes, token: str | None) -> None:
    with ExitStack() as stack:
        with serving(token=token) as url:
            connection = stack.enter_context(connection_to(url))
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.send(sent)
            time.sleep(0.3)
            with suppress(BlockingIOError):
                connection.send(b"x")
            began = time.monotonic()
        assert time.monotonic() - began < 5


def test_a_request_that_takes_too_long_is_given_up_when_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STOP_SECONDS", 0.5)
    slow = Sleeping(calls=0, seconds=2)
    with ThreadPoolExecutor(1) as pool:
        with serving({"slow": slow}) as url:
            answer = pool.submit(client(url, "slow", retries=0).score, red_batch(1))
            wait_until_busy(url, "slow")
            began = time.monotonic()
        assert time.monotonic() - began < 1.5
        answer.exception(timeout=20)


@pytest.mark.parametrize("sent", [b"", b"POST /sco", head("/score/brightness", 100)])
def test_a_client_that_drips_is_cut_off(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token that it does not have, so that its third request is answered before the body came."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)
    with serving(token="sesame") as url, connection_to(url) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        with suppress(OSError):  # reset by the server
            while time.monotonic() < began + 8:
                time.sleep(0.1)
                connection.sendall(b"x")
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("path", ["/score/brightness", "/applies/brightness"])
@pytest.mark.parametrize("pattern", ['{"prompts":[HERE]}', '{"prompts":[{"metadata":{"a":[HERE]}}]}'])
def test_a_large_or_nested_json_takes_little_memory(path: str, pattern: str) -> None:
    filler = pattern.replace("HERE", "[]," * (5 << 20) + "[]").encode()
    deep = pattern.replace("HERE", "[" * 100_000 + "]" * 100_000).encode()
    with serving() as url:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for body in (filler, filler + b"\n", deep):
            status, answer = ask(url, "POST", path, body)
            assert status in (400, 413)
            assert len(answer["error"]) < 400
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120 << 10, "of a body of 15 MiB"
        assert ask(url, "GET", "/metrics")[1]["rewards"]["brightness"]["calls"] == 0


def test_prompts_are_limited_like_images() -> None:
    prompts = json.loads(encode_batch(red_batch(4)).partition(b"\n")[0])["prompts"]
    with serving(max_batch=3) as url:
        ask_for = partial(ask, url, "POST", "/applies/brightness")
        assert ask_for(json.dumps({"prompts": prompts[:3]}).encode()) == (200, {"applies": [True] * 3})
        status, answer = ask_for(json.dumps({"prompts": prompts}).encode())
        assert (status, answer) == (400, {"error": "4 prompts, but this server takes at most 3 at once (--max-batch)"})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"not http at all\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n", 400),
        (b"GET /nothing HTTP/1.1\r\nHost: [\r\n\r\n", 404),
        (b"GET http://elsewhere/health HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"POST /score/brightness HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_every_error_is_json(request_: bytes, status: int) -> None:
    with serving() as url, connection_to(url) as connection:
        connection.sendall(request_)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == status
        assert list(json.loads(response.read())) == ["error"]
