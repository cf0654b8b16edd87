"""Reward servers and their client, over real sockets: the same scores as in process, or an error; never a wrong one."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.builtin.brightness import Brightness
from marble_rl.rewards.core.base import Reward, RewardBase, RewardBatch, Traits
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.client import Remote, RemoteFailed
from marble_rl.rewards.remote.server import Limits, RewardsServer, is_loopback
from marble_rl.rewards.remote.wire import (
    PROTOCOL,
    TOKEN_VARIABLE,
    Malformed,
    decode_batch,
    decode_scores,
    encode_batch,
    encode_traits,
)
from marble_rl.types import Prompt
from rewards_for_tests import After
from runs import marble, start

WEIGHTLESS = ("brightness", "colour", "jpeg_compressibility")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def pictures(count: int, seed: int = 0, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size + 8, 3), dtype=np.uint8)


def red_batch(count: int, seed: int = 0) -> RewardBatch:
    prompts = [Prompt(i, "a red “cup”", "s", {"bonus": i / 3, "deep": {"list": [1, None]}}) for i in range(count)]
    return RewardBatch(pictures(count, seed), prompts)


def built_in(*kinds: str) -> dict[str, Reward]:
    return build_rewards([RewardConfig(type=kind, name=kind) for kind in kinds])


def scorer_of(rewards: dict[str, Reward]) -> Scorer:
    """As a server has it: trying again is the client's business."""
    return Scorer([RewardConfig(type="x:y", name=name, retries=0) for name in rewards], rewards)


@contextmanager
def serving(rewards: dict[str, Reward] | None = None, token: str | None = None, **limits: int) -> Iterator[str]:
    """Address of a server in this process."""
    server = RewardsServer("127.0.0.1", 0, token, Limits(**limits), notice=lambda text: None)
    server.start(scorer_of(built_in(*WEIGHTLESS) if rewards is None else rewards))
    try:
        yield server.url
    finally:
        server.stop()


def client(url: str | list[str], reward: str = "brightness", **settings: Any) -> Remote:
    remote = Remote(url, reward, **{"backoff": 0.01, "timeout": 5.0, **settings})
    remote.load(CPU)
    return remote


def ask(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
    with closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


# The same scores


@pytest.mark.parametrize("kind", WEIGHTLESS)
def test_served_scores_are_those_in_process_bit_for_bit(kind: str) -> None:
    with serving() as url:
        remote = client(url, kind)
        for seed in range(5):
            batch = red_batch(seed + 1, seed)
            assert list(remote.score(batch)) == list(built_in(kind)[kind].score(batch))


def test_awkward_floats_survive() -> None:
    values = [0.1, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308, float(np.float32(0.1)), -1e-17]
    reply = json.loads(json.dumps({"scores": values}))
    assert np.array(decode_scores(reply, 7)).tobytes() == np.array(values).tobytes()


def test_the_reward_sees_what_it_would_see_in_process() -> None:
    class Recorder(RewardBase):
        def score(self, batch: RewardBatch) -> list[float]:
            self.batch = batch
            batch.images[0] = 0  # may be written to
            return [0.0] * len(batch.prompts)

    recorder = Recorder()
    prompts = [Prompt(7, "né\n", "s", {"a": [1.5, {"b": None}]}), Prompt(8, "", "t", rewards=frozenset({"x", "y"}))]
    with serving({"r": recorder}) as url:
        client(url, "r").score(RewardBatch(pictures(2), prompts))
    assert recorder.batch.prompts == prompts
    assert recorder.batch.images[1].tobytes() == pictures(2)[1].tobytes()


def test_applicability_is_the_rewards_own_and_asked_once_for_each_prompt() -> None:
    class Counting(RewardBase):
        asked = 0

        def applies_to(self, prompt: Prompt) -> bool:
            self.asked += 1
            return "red" in prompt.text

        def score(self, batch: RewardBatch) -> list[float]:
            return [1.0] * len(batch.prompts)

    reward = Counting()
    yes, no = Prompt(0, "a red cup", "s"), Prompt(1, "a cup", "s")
    with serving({"r": reward}) as url:
        unloaded = Remote(url, "r")
        assert unloaded.applies_to(no), "before load nobody is asked"
        remote = client(url, "r")
        assert [remote.applies_to(prompt) for prompt in [yes, no] * 10] == [True, False] * 10
        assert reward.asked == 2
        with pytest.raises(RemoteFailed, match="does not apply to the prompt 'a cup'"):
            remote.score(RewardBatch(pictures(2), [yes, no]))
    with pytest.raises(RewardFailed, match=r"'a hat' is unknown: remote reward 'r': http://127"):
        remote.applies_to(Prompt(2, "a hat", "s"))


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


# Servers that fail


def reply(body: str, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n{body}".encode()


FAULTS = {
    "HTTP 500": (reply('{"error": "out of memory"}', "500 Oops"), "HTTP 500: out of memory"),
    "HTTP 500 without a reason": (reply("<html>", "500 Oops"), "HTTP 500: b'<html>'"),
    "redirect": (reply("", "302 Found"), "HTTP 302"),
    "NaN": (reply('{"scores": [0.5, NaN]}'), "score 1 is 'nan'"),
    "infinite": (reply('{"scores": [Infinity, 1]}'), "score 0 is 'inf'"),
    "beyond float64": (reply('{"scores": [0, 1%s]}' % ("0" * 400)), "not a finite number"),
    "text": (reply('{"scores": ["0.5", "0.5"]}'), "score 0 is '0.5'"),
    "true": (reply('{"scores": [true, true]}'), "score 0 is 'True'"),
    "too few": (reply('{"scores": [0.5]}'), "1 scores for 2 images"),
    "too many": (reply('{"scores": [0.5, 0.5, 0.5]}'), "3 scores for 2 images"),
    "no scores": (reply('{"values": [0.5, 0.5]}'), "no list of `scores`"),
    "a list": (reply("[0.5, 0.5]"), "not a JSON object"),
    "garbage": (reply("\0\1\2 garbage"), "not a JSON object"),
    "deep": (reply('{"scores":' + "[" * 100_000), "not a JSON object"),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n", "BadStatusLine"),
    "truncated": (reply('{"scores": [0.5, 0.', length=30), "lacks 11 bytes"),
    "truncated, without length": (b'HTTP/1.0 200 OK\r\n\r\n{"scores": [0.5, 0.5', "not a JSON object"),
    "nothing": (b"", "RemoteDisconnected"),
    "hangs": (None, "no answer within 1 seconds"),
}


HEALTHY = {"protocol": PROTOCOL, "version": "0", "rewards": {"brightness": encode_traits(Brightness.traits)}}


class Faulty(ThreadingHTTPServer):
    """Healthy, but for its scores."""

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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_is_retried_elsewhere_or_an_error(fault: str) -> None:
    answer, reason = FAULTS[fault]
    timeout = 1.0 if answer is None else 5.0
    batches = [red_batch(2, seed) for seed in range(4)]
    own = built_in("brightness")["brightness"]
    with Faulty.running(answer) as faulty, serving() as url:
        both = client([faulty.url, url], timeout=timeout)
        assert [list(both.score(batch)) for batch in batches] == [list(own.score(batch)) for batch in batches]
        assert faulty.asked == 1, "a server that failed is asked last for a while"

        alone = client(faulty.url, timeout=timeout, retries=0 if answer is None else 1)
        with pytest.raises(RemoteFailed) as error:
            alone.score(batches[0])
    assert "remote reward 'brightness'" in str(error.value)
    assert faulty.url in str(error.value)
    assert reason in str(error.value)


def test_the_run_is_told_which_servers_failed_and_why() -> None:
    configs = [RewardConfig(type="x:y", name="mine", retries=0)]
    with Faulty.running(FAULTS["NaN"][0]) as a, Faulty.running(FAULTS["HTTP 500"][0]) as b:
        scorer = Scorer(configs, {"mine": client([a.url, b.url])})
        with pytest.raises(RewardFailed) as error:  # applicability is asked first, and fails as well
            scorer.score(["mine"], torch.from_numpy(pictures(2)), red_batch(2).prompts, batch_size=2)
    for part in ("remote reward 'brightness'", a.url, b.url, "out of memory"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("what", "says"), [("raise", "fell over"), ("nan", "returned nan"), ("short", "1 scores for 2")]
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
        with pytest.raises(RewardFailed, match=r"reward 'mine' failed after 2 attempts .*'odd'.*HTTP 500"):
            scorer.score(["mine"], torch.from_numpy(pictures(2)), red_batch(2).prompts, batch_size=2)
        assert ask(url, "GET", "/metrics")[1]["rewards"]["odd"]["failures"] == 3


def test_a_server_that_goes_away_between_batches() -> None:
    own = built_in("brightness")["brightness"]
    with serving() as stays, ExitStack() as stack:
        leaves = stack.enter_context(serving())
        both, lonely = client([leaves, stays]), client(leaves)
        for seed in range(8):
            if seed == 3:
                stack.close()
            assert both.score(red_batch(3, seed)) == own.score(red_batch(3, seed))
        with pytest.raises(RemoteFailed, match="ConnectionRefusedError"):
            lonely.score(red_batch(3))


def test_batches_are_spread_over_the_servers() -> None:
    with serving() as a, serving() as b:
        remote = client([a, b])
        for seed in range(6):
            remote.score(red_batch(1, seed))
        assert [ask(url, "GET", "/metrics")[1]["rewards"]["brightness"]["calls"] for url in (a, b)] == [3, 3]


def test_every_server_has_a_batch_under_way() -> None:
    """Eight batches, two servers with a slow reward each: both are busy at the same time, and no score is mixed up."""
    lock = threading.Lock()
    under_way: list[int] = []
    inside = 0

    class Slow(RewardBase):
        def score(self, batch: RewardBatch) -> list[float]:
            nonlocal inside
            with lock:
                inside += 1
                under_way.append(inside)
            time.sleep(0.05)
            with lock:
                inside -= 1
            return list(built_in("brightness")["brightness"].score(batch))

    whole = red_batch(16)
    with serving({"r": Slow()}) as a, serving({"r": Slow()}) as b:
        scorer = Scorer([RewardConfig(type="x:y", name="mine")], {"mine": client([a, b], "r")})
        table = scorer.score(["mine"], torch.from_numpy(whole.images), whole.prompts, batch_size=2)
        calls = [ask(url, "GET", "/metrics")[1]["rewards"]["r"]["calls"] for url in (a, b)]
    assert max(under_way) == 2
    assert sum(calls) == 8
    assert min(calls) >= 2
    assert table.values[:, 0].tolist() == built_in("brightness")["brightness"].score(whole)


def test_what_a_served_reward_declares_reaches_the_client() -> None:
    class Declared(RewardBase):
        traits = Traits(range=(0.0, 2.0), higher_is_better=False, deterministic=True, batch_size=3)

        def score(self, batch: RewardBatch) -> list[float | None]:
            return [None, *([1.5] * (len(batch.prompts) - 1))]

    with serving({"r": Declared()}) as url:
        remote = client(url, "r")
        scorer = Scorer([RewardConfig(type="x:y", name="mine")], {"mine": remote})
        table = scorer.score(["mine"], torch.from_numpy(pictures(2)), red_batch(2).prompts, batch_size=2)
    assert remote.traits == Traits(
        range=(0.0, 2.0), higher_is_better=False, deterministic=True, concurrency=1, retries=0
    )
    assert table.values[:, 0].tolist() == [0.0, -1.5]
    assert table.applicable[:, 0].tolist() == [False, True]


def test_videos_travel() -> None:
    videos = np.random.default_rng(0).integers(0, 256, (2, 3, 24, 32, 3), dtype=np.uint8)
    batch = RewardBatch(videos, red_batch(2).prompts)
    own = build_rewards([RewardConfig(type="motion", name="motion")])
    with serving(own) as url:
        assert list(client(url, "motion").score(batch)) == list(own["motion"].score(batch))


# What a server refuses


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
        (b"", 400, "not a JSON object"),
        (b"\x80\x04pickle", 400, "not a JSON object"),
        (good[:-1], 400, "bytes of pixels"),
        (good + b"x", 400, "bytes of pixels"),
        (one_prompt + b"\n" + pixels, 400, "1 prompts for 2 images"),
        (header.replace(b"[2, ", b"[0, ") + b"\n", 400, "none 0"),
        (header.replace(b'"text"', b'"txt"') + b"\n" + pixels, 400, "prompts.0.text"),
    ]
    with serving(max_batch=3, max_body_bytes=10_000) as url:
        for body, status, reason in cases:
            got, answer = ask(url, "POST", "/score/brightness", body)
            assert (got, reason in answer["error"]) == (status, True), answer
        assert ask(url, "POST", "/score/brightnes", good)[1]["error"].startswith("no reward 'brightnes' here")
        assert ask(url, "POST", "/", good)[0] == ask(url, "GET", "/score/brightness")[0] == 404
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
            start_line = f"POST /score/brightness HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(start_line.encode() + body[:-10])
            connection.shutdown(socket.SHUT_WR)
            assert b"the body ends after" in b"".join(iter(lambda: connection.recv(4096), b""))
        assert ask(url, "GET", "/metrics")[1]["rewards"]["brightness"]["calls"] == 0


def test_decoding_refuses_other_shapes() -> None:
    for shape in ([2, 4, 4], [2, 4, 4, 1], [2, -4, -4, 3], [True, 4, 4, 3], "2443", None):
        with pytest.raises(Malformed):
            decode_batch(json.dumps({"shape": shape, "prompts": []}).encode() + b"\n", 10)


# Setting up


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"url": "127.0.0.1:8765"}, "url: '127.0.0.1:8765' is no address"),
        ({"url": "ftp://host"}, "url"),
        ({"url": "http://host:99999"}, "url"),
        ({"url": []}, "url"),
        ({"url": [3]}, "url: 3 is no address"),
        ({"timeout": 0}, "timeout: 0 will not do"),
        ({"retries": -1}, "retries: -1 will not do"),
        ({"retrys": 1}, "unknown argument 'retrys'"),
        ({"reward": ""}, "reward"),
    ],
)
def test_bad_params_are_found_before_anything_is_asked(params: dict[str, Any], says: str) -> None:
    config = RewardConfig(
        type="remote", name="far", params={"url": "http://127.0.0.1:1", "reward": "brightness", **params}
    )
    with pytest.raises(InputError) as error:
        build_rewards([config])
    assert "rewards.0 (far).params" in str(error.value)
    assert says in str(error.value)


def test_loading_says_what_is_wrong_with_which_server() -> None:
    missing = "does not serve it; served are: colour"
    with (
        serving() as good,
        serving(built_in("colour")) as other,
        pytest.raises(RemoteFailed, match=rf"{other}: {missing}"),
    ):
        client([good, other])
    with pytest.raises(RemoteFailed, match=rf"{good}: ConnectionRefusedError"):
        client(good)
    with (
        Faulty.running(b"", health={"status": "ok"}) as stranger,
        pytest.raises(RemoteFailed, match="no reward server that this version understands"),
    ):
        client(stranger.url)


def served_config(path: Path) -> Path:
    """A config that has a `rewards` section only."""
    rewards = [
        {"name": "bright", "type": "brightness"},
        {"name": "slow", "type": "rewards_for_tests:slow", "params": {"seconds": 1.5}},
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


# Real processes


@contextmanager
def processes(*commands: list[object]) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    """`marble rewards serve` with each command's arguments, and its address; killed in the end if it still runs."""
    with ExitStack() as stack:
        children = [stack.enter_context(start("rewards", "serve", *command, "--port", 0)) for command in commands]
        for child in children:
            stack.callback(child.kill)
        yield [(child, address(child)) for child in children]


def address(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = next(line for line in child.stdout if line.startswith("serving"))
    return line.split(" at ")[1].split()[0]


def wait_until_busy(url: str, reward: str) -> None:
    deadline = time.monotonic() + 20
    while ask(url, "GET", "/metrics")[1]["rewards"][reward]["calls"] == 0:
        assert time.monotonic() < deadline, "the request never came"
        time.sleep(0.01)


def test_sigterm_finishes_the_request_under_way_and_a_kill_moves_it_to_the_other_server(tmp_path: Path) -> None:
    config = served_config(tmp_path / "c.yaml")
    batch = red_batch(3)
    expected = [float(image[..., 0].mean()) / 255 for image in batch.images]
    with (
        processes([config, "--only", "slow"], [config]) as ((killed, first), (stopped, second)),
        ThreadPoolExecutor(1) as pool,
    ):
        served = [list(ask(url, "GET", "/health")[1]["rewards"]) for url in (first, second)]
        assert served == [["slow"], ["bright", "slow"]]
        answer = pool.submit(client([first, second], "slow").score, batch)
        wait_until_busy(first, "slow")
        killed.kill()
        host, port = second.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):  # asks for nothing, and is not waited for
            wait_until_busy(second, "slow")
            stopped.send_signal(signal.SIGTERM)
            assert answer.result(timeout=10) == expected
            assert stopped.wait(timeout=20) == 0
        with pytest.raises(ConnectionRefusedError):
            ask(second, "GET", "/health")
