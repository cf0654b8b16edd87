"""Judges behind an OpenAI-compatible API, against a real HTTP server on this machine that can misbehave."""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.chat import ChatError, seconds_asked
from marble_rl.rewards.remote.judge import Judge, UnifiedReward
from marble_rl.types import Prompt

CPU = torch.device("cpu")
KEY = "sk-Secret.0123456789"

Reply = Callable[["Handler", dict[str, Any]], None]


class Handler(BaseHTTPRequestHandler):
    """Does as its server's `reply` says, after taking down the request."""

    server: Server

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
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return None


class Server(ThreadingHTTPServer):
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


@pytest.fixture
def start() -> Iterator[Callable[[], Server]]:
    running: list[Server] = []

    def start() -> Server:
        server = Server()
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.closing.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(start: Callable[[], Server]) -> Server:
    return start()


def judge(url: Any, **params: Any) -> UnifiedReward:
    return UnifiedReward(**{"url": url, "model": "eye", "backoff": 0.001, "timeout": 10.0, **params})


def batch(count: int, text: str = "a cup") -> RewardBatch:
    """Pictures of plain colour 0, 1, 2, ..."""
    images = np.stack([np.full((8, 8, 3), i, dtype=np.uint8) for i in range(count)])
    return RewardBatch(images, [Prompt(0, text, "s") for _ in range(count)])


def failure(reward: Judge, count: int = 1) -> ChatError:
    with pytest.raises(ChatError) as caught:
        reward.score(batch(count))
    return caught.value


def test_scores_come_in_the_order_of_the_pictures(server: Server) -> None:
    server.replies = [brightness]
    assert judge(server.url, concurrency=5).score(batch(20)) == pytest.approx([1 + i / 1000 for i in range(20)])


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_requests_at_once_as_allowed(server: Server, concurrency: int) -> None:
    together = threading.Barrier(concurrency)
    inside: list[int] = []
    most = 0

    def meets(handler: Handler, body: dict[str, Any]) -> None:
        nonlocal most
        with server.lock:
            inside.append(1)
            most = max(most, len(inside))
        together.wait(5)  # for ever alone, were fewer at once than allowed
        with server.lock:
            inside.pop()
        handler.send(200, completion("Final Score: 3"))

    server.replies = [meets]
    assert judge(server.url, concurrency=concurrency, retries=0).score(batch(6)) == [3.0] * 6
    assert most == concurrency


def test_several_threads_may_score_at_once(server: Server) -> None:
    server.replies = [brightness]
    reward = judge(server.url, concurrency=3)
    scores: list[Any] = [None] * 4

    def work(i: int) -> None:
        scores[i] = reward.score(batch(6))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [[pytest.approx(1 + i / 1000) for i in range(6)]] * 4


def test_what_is_sent(server: Server) -> None:
    reward = Judge(
        server.url + "/", model="eye", prompt='{"say": {prompt}} {prompt}', pattern=r"Score: (\d+)", max_tokens=7
    )
    pixels = np.random.default_rng(0).integers(0, 256, (1, 6, 9, 3), dtype=np.uint8)
    assert reward.score(RewardBatch(pixels, [Prompt(0, "{x} \\1 “ü”", "s")])) == [3.0]
    (body,) = server.requests
    assert np.array_equal(picture(body), pixels[0])
    assert question(body) == '{"say": {x} \\1 “ü”} {x} \\1 “ü”'
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("eye", 7, 0)
    assert "Authorization" not in server.headers[0]


def test_unifiedreward_has_its_own_question(server: Server) -> None:
    judge(server.url).score(batch(1, "a red cup"))
    assert question(server.requests[0]).endswith("Caption: [a red cup]")
    assert "'Final Score:'" in question(server.requests[0])


def test_fields_may_be_added_and_left_out(server: Server) -> None:
    extra = {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}}
    judge(server.url, max_tokens=None, temperature=None, image_format="jpeg", extra=extra).score(batch(1))
    (body,) = server.requests
    assert {key: body[key] for key in extra} == extra
    assert not {"max_tokens", "temperature"} & set(body)
    assert picture(body).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Final Score: 4", 4.0),
        ("cup (object): 1\nFinal Score:3.62", 3.62),
        ("Final Score: 2? No. Final Score: 5.", 5.0),
        ("Final Score: 4/5", 4.0),
    ],
)
def test_the_last_score_of_a_reply_counts(server: Server, text: str, score: float) -> None:
    server.replies = [says(text)]
    assert judge(server.url).score(batch(1)) == [score]


@pytest.mark.parametrize(
    ("reply", "named", "advice"),
    [
        (says("A fine picture."), "A fine picture.", "mend `pattern`"),
        (says(""), "no match", "mend `pattern`"),
        (says("Final Score: NaN"), "Final Score: NaN", "mend `pattern`"),
        (says("Final Score: 10"), "score 10, which is not between 1 and 5", "correct `scale`"),
        (says("Final Score: -3"), "score -3, which", "correct `scale`"),
        (says("Final Score: 1" + 400 * "0"), "gives no finite number", "group must be the number"),
        (says("Final Score: 4", "length"), "was cut off", "raise max_tokens"),
        (says(None), "holds no text", "plain text"),
        (says([{"type": "text"}]), "holds no text", "plain text"),
        (sends(200, "{}"), "holds no message", "chat server"),
        (sends(200, "[1]"), "holds no message", "chat server"),
        (sends(200, '{"choices": []}'), "holds no message", "chat server"),
        (sends(200, '{"choices": ["a"]}'), "holds no message", "chat server"),
        (sends(200, "<html>hello</html>"), "not JSON: <html>hello</html>", "base of an OpenAI-compatible API"),
        (sends(200, "\xff\x00"), "not JSON", "base of an OpenAI-compatible API"),
        (sends(200, 100_000 * "["), "not JSON", "base of an OpenAI-compatible API"),
        (stops_halfway, "not JSON", "base of an OpenAI-compatible API"),
        (sends(500, "out of memory"), "HTTP 500: out of memory", "server's log"),
        (sends(503, ""), "HTTP 503: no text", "server's log"),
        (sends(429, "slow down"), "HTTP 429: slow down", "lower `concurrency`"),
        (sends(408, "late"), "HTTP 408: late", "what it refuses"),
        (resets, "cannot be reached: ", "start the server"),
    ],
)
def test_what_cannot_be_used_is_tried_again_then_an_error(
    server: Server, reply: Reply, named: str, advice: str
) -> None:
    server.replies = [reply]
    error = failure(judge(server.url, retries=2))
    for part in (server.url, named, advice, "(attempt 3 of 3)"):
        assert part in str(error)
    assert len(server.requests) == 3
    assert len(str(error)) < 700
    server.replies = [reply, reply, says("Final Score: 2")]
    server.requests.clear()
    assert judge(server.url, retries=2).score(batch(1)) == [2.0]


@pytest.mark.parametrize("text", ["Score: NaN", "Score: inf", "Score: -1e999", "Score: lots"])
def test_a_loose_pattern_lets_no_nan_through(server: Server, text: str) -> None:
    server.replies = [says(text)]
    assert "mend `pattern`" in str(failure(judge(server.url, pattern=r"Score: (\S+)", retries=0)))


def test_a_group_that_took_no_part_is_no_score(server: Server) -> None:
    server.replies = [says("none")]
    assert "no match" in str(failure(judge(server.url, pattern=r"none|(\d+)", retries=0)))


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (400, "takes pictures"),
        (401, "api_key_env"),
        (403, "api_key_env"),
        (404, "/v1"),
        (422, "refuses"),
        (302, "redirects are not followed"),
    ],
)
def test_a_refusal_is_not_tried_again(server: Server, status: int, advice: str) -> None:
    server.replies = [sends(status, "no", Location="http://127.0.0.1:9/v1/chat/completions"), says("Final Score: 3")]
    error = failure(judge(server.url))
    assert f"{server.url}/chat/completions answered with HTTP {status}: no; " in str(error)
    assert advice in str(error)
    assert "attempt" not in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("reply", [hangs, trickles])
def test_a_server_that_hangs_is_given_up(server: Server, reply: Reply) -> None:
    server.replies = [reply]
    begun = time.monotonic()
    error = failure(judge(server.url, timeout=0.1, retries=1))
    assert time.monotonic() - begun < 4
    assert f"{server.url}/chat/completions did not answer within 0.1 seconds; raise `timeout`" in str(error)
    server.replies = [says("Final Score: 3")]
    assert judge(server.url).score(batch(1)) == [3.0]


def test_no_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        assert f"{url}/chat/completions cannot be reached: ConnectionRefused" in str(failure(judge(url)))


def test_pauses_double(server: Server) -> None:
    server.replies = [sends(500, "no"), sends(500, "no"), sends(500, "no"), says("Final Score: 3")]
    judge(server.url, backoff=0.05).score(batch(1))
    pauses = np.diff(server.times)
    assert all(low <= pause for low, pause in zip((0.025, 0.05, 0.1), pauses, strict=True))
    assert pauses.sum() < 5


def test_retry_after_is_waited_for(server: Server) -> None:
    server.replies = [sends(429, "slow down", Retry_After="1"), says("Final Score: 3")]
    assert judge(server.url).score(batch(1)) == [3.0]
    assert np.diff(server.times) >= 1.0


def test_retry_after_as_a_date_or_as_nonsense() -> None:
    soon = datetime.now(timezone.utc) + timedelta(seconds=30)
    assert 28 < seconds_asked(format_datetime(soon, usegmt=True)) <= 30
    assert seconds_asked(format_datetime(soon - timedelta(days=1), usegmt=True)) == 0
    assert seconds_asked(" 7 ") == 7
    for nonsense in (None, "", "soon", "-1", "nan", "inf", "1e9", "9" * 5000, "Mon, 99 Foo 2020 00:00:00 GMT"):
        assert seconds_asked(nonsense) == 0


def test_requests_are_spread_and_a_retry_goes_elsewhere(start: Callable[[], Server]) -> None:
    servers = [start(), start(), start()]
    reward = judge([server.url for server in servers], retries=1)
    assert reward.score(batch(9)) == [3.0] * 9
    assert [len(server.requests) for server in servers] == [3, 3, 3]
    servers[1].replies = [sends(500, "broken")]
    assert reward.score(batch(9)) == [3.0] * 9
    assert [len(server.requests) for server in servers] == [6, 6, 9]


def test_a_failure_names_its_picture_and_ends_the_rest_early(server: Server) -> None:
    def refuses_the_third(handler: Handler, body: dict[str, Any]) -> None:
        red = int(picture(body)[0, 0, 0])
        if red == 2:
            handler.send(400, "not this one")
        else:
            handler.send(500, "broken")

    server.replies = [refuses_the_third]
    begun = time.monotonic()
    error = failure(judge(server.url, backoff=30.0, concurrency=3), count=40)
    assert time.monotonic() - begun < 10
    assert error.row == 2
    assert len(server.requests) < 10


def scorer(server: Server, timeout_of_entry: float | None = None, **params: Any) -> Scorer:
    params = {"url": server.url, "model": "eye", "backoff": 0.001, **params}
    config = RewardConfig(type="unifiedreward", name="eye", timeout=timeout_of_entry, params=params)
    return Scorer([config], build_rewards([config]))


def dislikes_cats(handler: Handler, body: dict[str, Any]) -> None:
    (sends(400, "no") if "cat" in question(body) else says("Final Score: 3"))(handler, body)


def test_a_failure_stops_the_run_and_names_the_prompt(server: Server) -> None:
    server.replies = [dislikes_cats]
    prompts = [Prompt(7, "a cup", "s"), Prompt(8, "a cat", "s")]
    with pytest.raises(RewardFailed, match=r"reward 'eye' failed .* prompt 8 \('a cat'\): ChatError: http://127"):
        scorer(server).score(["eye"], torch.zeros(2, 8, 8, 3, dtype=torch.uint8), prompts, 2)


def test_a_judge_that_hangs_keeps_no_program_alive(server: Server) -> None:
    """A program that ends waits for threads that are no daemons, and for those of executors."""
    server.replies = [lambda handler, body: server.closing.wait(300)]
    program = f"""
import sys, threading
import numpy as np
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.remote.judge import UnifiedReward
from marble_rl.types import Prompt

batch = RewardBatch(np.zeros((4, 8, 8, 3), np.uint8), [Prompt(0, "a cup", "s")] * 4)
judge = UnifiedReward({server.url!r}, model="eye", concurrency=2, timeout=300)
threading.Thread(target=judge.score, args=(batch,), daemon=True).start()
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 100
            while len(server.requests) < 2 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(server.requests) == 2
            process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0


def test_nobody_asks_on_for_a_batch_that_was_given_up(server: Server) -> None:
    def takes_its_time(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(0.1)
        handler.send(200, completion("Final Score: 3"))

    server.replies = [takes_its_time]
    images = torch.zeros(60, 8, 8, 3, dtype=torch.uint8)
    with pytest.raises(RewardFailed, match="TimeoutError: "):
        scorer(server, timeout_of_entry=0.5, concurrency=2).score(["eye"], images, batch(60).prompts, 60)
    time.sleep(0.3)  # for those under way
    asked = len(server.requests)
    time.sleep(0.5)
    assert len(server.requests) == asked < 30


def test_loading_asks_each_server(start: Callable[[], Server]) -> None:
    servers = [start(), start()]
    judge([server.url for server in servers]).load(CPU)
    assert [server.listings for server in servers] == [1, 1]
    assert not servers[0].requests


@pytest.mark.parametrize("listing", [sends(404, "no such page"), sends(405, ""), sends(200, "[]")])
def test_a_server_without_a_list_is_asked_for_a_word(server: Server, listing: Reply) -> None:
    server.listing = listing
    judge(server.url).load(CPU)
    assert len(server.requests) == 1
    server.replies = [sends(404, "nothing here")]
    with pytest.raises(InputError, match=r"'eye' cannot be loaded: ChatError: .*HTTP 404: nothing here.* /v1"):
        scorer(server).load(CPU)


def test_a_model_under_another_name(server: Server) -> None:
    """Gateways know more names than they list; the request decides."""
    judge(server.url, model="alias").load(CPU)
    server.replies = [sends(404, "no such model")]
    with pytest.raises(ChatError, match=r"no such model.*`model` is 'ear'; the server lists: eye"):
        judge(server.url, model="ear").load(CPU)


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        (sends(401, "who are you"), "HTTP 401: who are you; name the environment variable"),
        (sends(503, "loading"), "HTTP 503: loading; see the server's log"),
        (sends(200, "<html>"), "not JSON: <html>"),
        (hangs, "did not answer within 0.1 seconds"),
        (resets, "cannot be reached"),
    ],
)
def test_a_server_that_is_not_ready_is_found_while_loading(server: Server, listing: Reply, message: str) -> None:
    server.listing = listing
    with pytest.raises(InputError, match=f"{server.url}/models .*{message}"):
        scorer(server, timeout=0.1 if listing is hangs else 10, retries=1).load(CPU)


def test_a_server_that_comes_up_late_is_waited_for(server: Server) -> None:
    ready = server.listing
    server.listing = lambda handler, body: ready(handler, body) if server.listings > 2 else handler.send(503, "loading")
    judge(server.url, retries=2).load(CPU)


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_the_key_is_sent_and_never_shown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    reward = judge(server.url, api_key_env="JUDGE_KEY", retries=0)
    reward.score(batch(1))
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    loose = judge(server.url, api_key_env="JUDGE_KEY", retries=0, pattern=r"Score: (\S+)")
    for reply in (
        sends(401, f"bad key {KEY}"),
        sends(500, 195 * "x" + KEY),
        sends(200, KEY),
        says(f"My key is {KEY}"),
        says(f"Score: {KEY}"),
    ):
        server.replies = [reply]
        assert KEY[:8] not in shown(failure(loose))
        error = failure(reward)
        assert "[key]" in str(error)
        assert KEY[:8] not in shown(error)
    assert KEY not in repr(vars(reward))


@pytest.mark.parametrize("value", [None, "", " ", f"{KEY} {KEY}", f"{KEY}\nX: y", f"{KEY}ü"])
def test_a_key_that_cannot_be_sent(server: Server, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(InputError, match="api_key_env: the environment variable 'JUDGE_KEY'") as caught:
        judge(server.url, api_key_env="JUDGE_KEY").load(CPU)
    assert KEY not in shown(caught.value)
    assert not server.listings


def test_a_proxy_is_not_asked_for_this_machine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert judge(server.url).score(batch(1)) == [3.0]


GOOD = {"url": "http://localhost:8000/v1", "model": "eye", "prompt": "How good is {prompt}?", "pattern": r"(\d+)"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("url", "", "'' is no address"),
        ("url", [], "is no address"),
        ("url", 8000, "8000 is no address"),
        ("url", "localhost:8000/v1", "'localhost:8000/v1' is no address"),
        ("url", "ftp://localhost/v1", "is no address"),
        ("url", "http://local host/v1", "is no address"),
        ("url", "http://localhost:99999/v1", "is no address"),
        ("url", ["http://localhost:1/v1", None], "None is no address"),
        ("url", "http://localhost/v1/chat/completions", "leave /chat/completions out"),
        ("model", None, "is missing"),
        ("model", " ", "' ' is no text"),
        ("prompt", None, "is missing"),
        ("prompt", "", "'' is no text"),
        ("prompt", "How good is {promt}?", "{promt} is not filled in; write {prompt}"),
        ("pattern", None, "is missing"),
        ("pattern", "(", "'(' is no regular expression"),
        ("pattern", r"\d+", "has 0 groups"),
        ("pattern", r"(a|b): (\d+)", "has 2 groups"),
        ("scale", [1], "[1] is no range"),
        ("scale", [5, 1], "[5, 1] is no range"),
        ("scale", ["low", "high"], "is no range"),
        ("scale", [0, float("nan")], "is no range"),
        ("scale", 5, "5 is no range"),
        ("concurrency", 0, "0 will not do; give a whole number of at least 1"),
        ("concurrency", 2.5, "2.5 will not do"),
        ("concurrency", True, "True will not do"),
        ("retries", -1, "-1 will not do; give a whole number of at least 0"),
        ("backoff", -1, "-1 will not do; give 0 or more seconds"),
        ("timeout", 0, "0 will not do; give more than 0 seconds"),
        ("timeout", float("inf"), "inf will not do"),
        ("timeout", None, "None will not do"),
        ("max_tokens", 0, "0 will not do"),
        ("temperature", -0.5, "-0.5 will not do"),
        ("image_format", "gif", "'gif' is unknown; use one of png, jpeg"),
        ("extra", "seed", "'seed' is not a mapping"),
    ],
)
def test_bad_params_are_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        build_rewards([RewardConfig(type="judge", name="eye", params={**GOOD, name: value})])
    assert str(caught.value).startswith(f"rewards.0 (eye).params.{name}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key_env", KEY),
        ("api_key_env", "hf_abcdefgh"),
        ("api_key_env", 1234),
        ("url", f"http://user:{KEY}@localhost/v1"),
        ("url", f"http://localhost/v1?key={KEY}"),
    ],
)
def test_a_key_in_the_config_is_refused_and_not_repeated(name: str, value: Any) -> None:
    with pytest.raises(InputError, match="environment variable") as caught:
        Judge(**{**GOOD, name: value})
    assert KEY not in str(caught.value)
    assert str(value) not in str(caught.value)


def test_the_examples_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards" / "judge.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    rewards = [RewardConfig(**entry) for example in examples for entry in yaml.safe_load(example)["rewards"]]
    assert {reward.type for reward in rewards} == {"judge", "unifiedreward"}
    build_rewards(rewards)
    table = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert table == set(inspect.signature(Judge).parameters)


def test_a_question_may_be_about_the_picture_alone() -> None:
    assert Judge(**{**GOOD, "prompt": 'How sharp? Answer {"score": 3}.'}).prompt
