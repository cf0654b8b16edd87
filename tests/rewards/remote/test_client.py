"""The `remote` reward against real servers: the same scores as in process, or an error."""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core.base import RewardBase, RewardBatch, Traits
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.client import Remote, RemoteFailed
from marble_rl.rewards.remote.wire import PROTOCOL, TOKEN_VARIABLE
from marble_rl.types import Prompt
from reward_servers import HEALTHY, WEIGHTLESS, Faulty, ask, built_in, client, pictures, red_batch, reply, serving


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.parametrize("kind", WEIGHTLESS)
def test_served_scores_are_those_in_process_bit_for_bit(kind: str) -> None:
    with serving() as url:
        remote = client(url, kind)
        for seed in range(5):
            batch = red_batch(seed + 1, seed)
            assert list(remote.score(batch)) == list(built_in(kind)[kind].score(batch))


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
        unloaded = Remote(url=url, reward="r")
        assert unloaded.applies_to(no), "before load no server is asked"
        remote = client(url, "r")
        assert [remote.applies_to(prompt) for prompt in [yes, no] * 10] == [True, False] * 10
        assert reward.asked == 2
        with pytest.raises(RemoteFailed, match="does not apply to the prompt 'a cup'"):
            remote.score(RewardBatch(pictures(2), [yes, no]))
    with pytest.raises(RewardFailed, match=r"'a hat' is unknown: remote reward 'r': no usable answer in 3 attempts"):
        remote.applies_to(Prompt(2, "a hat", "s"))


FAULTS = {
    "HTTP 500": (reply('{"error": "out of memory"}', "500 Oops"), "HTTP 500: out of memory"),
    "HTTP 500 without a reason": (reply("<html>", "500 Oops"), "HTTP 500: b'<html>'"),
    "redirect": (reply("", "302 Found"), "HTTP 302"),
    "NaN": (reply('{"scores": [0.5, NaN]}'), "scores.1: Input should be a finite number"),
    "infinite": (reply('{"scores": [Infinity, 1]}'), "scores.0: Input should be a finite number"),
    "beyond float64": (reply('{"scores": [0, 1%s]}' % ("0" * 400)), "scores.1: "),
    "nested": (reply('{"scores": [[0.5], [0.5]]}'), "scores.0: Input should be a valid number"),
    "by name": (reply('{"scores": {"0": 0.5, "1": 0.5}}'), "scores: Input should be a valid array"),
    "a reason of megabytes": (reply(json.dumps({"error": 5_000_000 * "x"}), "500 Oops"), "... (5,000,000 characters)"),
    "too long": (reply(" " * (17 << 20)), "the reply is longer than 16777216 bytes"),
    "text": (reply('{"scores": ["0.5", "0.5"]}'), "scores.0: Input should be a valid number"),
    "true": (reply('{"scores": [true, true]}'), "scores.0: Input should be a valid number"),
    "too few": (reply('{"scores": [0.5]}'), "1 score for 2 images"),
    "too many": (reply('{"scores": [0.5, 0.5, 0.5]}'), "3 scores for 2 images"),
    "no scores": (reply('{"values": [0.5, 0.5]}'), "scores: Field required"),
    "a list": (reply("[0.5, 0.5]"), "Input should be an object"),
    "garbage": (reply("\0\1\2 garbage"), "Invalid JSON"),
    "deep": (reply('{"scores":' + "[" * 100_000), "Invalid JSON"),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n", "RemoteProtocolError"),
    "truncated": (reply('{"scores": [0.5, 0.', length=30), "received 19 bytes, expected 30"),
    "truncated, without length": (b'HTTP/1.0 200 OK\r\n\r\n{"scores": [0.5, 0.5', "Invalid JSON"),
    "nothing": (b"", "Server disconnected"),
    "hangs": (None, "did not answer within 1 seconds"),
}


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
    assert len(str(error.value)) < 3000


def test_the_error_names_the_servers_that_failed_and_why() -> None:
    configs = [RewardConfig(type="x:y", name="mine", retries=0)]
    with Faulty.running(FAULTS["NaN"][0]) as a, Faulty.running(FAULTS["HTTP 500"][0]) as b:
        scorer = Scorer(configs, {"mine": client([a.url, b.url])})
        with pytest.raises(RewardFailed) as error:  # applicability is asked first, and fails as well
            scorer.score(["mine"], torch.from_numpy(pictures(2)), red_batch(2).prompts, batch_size=2)
    for part in ("remote reward 'brightness'", a.url, b.url, "out of memory"):
        assert part in str(error.value)


def test_a_wrong_token_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARBLE_REWARDS_TOKEN", "wrong")
    with (
        serving(token="right") as url,
        pytest.raises(RemoteFailed, match=r"no usable answer in 1 attempt: .*HTTP 401.*MARBLE_REWARDS_TOKEN"),
    ):
        client(url, retries=5)


def test_a_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a server sends it back, or where it cannot be sent."""
    monkeypatch.setenv("MY_TOKEN", "s3cret-t0ken")
    with Faulty.running(reply('{"error": "no access for s3cret-t0ken"}', "403 No")) as faulty:
        remote = client(faulty.url, token_env="MY_TOKEN")
        with pytest.raises(RemoteFailed, match=r"HTTP 403: no access for \[token\]"):
            remote.score(red_batch(1))
        for odd in ("s3cret\nX-Admin: 1", "s3cret\rx", "s3cret x", "s3cret\x7f", "s3cret\x01"):
            monkeypatch.setenv("MY_TOKEN", odd)
            with pytest.raises(InputError, match="'MY_TOKEN' holds white space or control characters") as refused:
                client(faulty.url, token_env="MY_TOKEN")
            assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"higher_is_better": "false"}, "higher_is_better: Input should be a valid boolean"),
        ({"range": [0, "1"]}, "range.1: Input should be a valid number"),
        ({"range": [0, 1, 2]}, "range"),
        ({"range": [math.nan, 1]}, "range.0: Input should be a finite number"),
        ({"media": "sound"}, "media: Input should be 'image' or 'video'"),
        ({"deterministic": None}, "deterministic: Input should be a valid boolean"),
    ],
)
def test_a_server_whose_description_is_odd_is_not_believed(declared: dict[str, Any], says: str) -> None:
    """A `"false"` that counted as true would turn the sign of all scores."""
    rewards = {"brightness": {**HEALTHY["rewards"]["brightness"], **declared}}
    with (
        Faulty.running(b"", {**HEALTHY, "rewards": rewards}) as faulty,
        pytest.raises(RemoteFailed, match=f"does not describe its reward as this version expects: .*{says}"),
    ):
        client(faulty.url)


def test_scores_of_a_server_are_bounded_like_all_others() -> None:
    with Faulty.running(reply('{"scores": [0.5, 1e308]}')) as faulty:
        traits = {**HEALTHY["rewards"]["brightness"], "range": [None, None]}
        faulty.health = {**HEALTHY, "rewards": {"brightness": traits}}
        reward = CalledReward(RewardConfig(type="x:y", name="mine"), client(faulty.url))
        with pytest.raises(RewardFailed, match=r"reward 'mine' failed on .* prompt 1 .*returned 1e\+308"):
            reward.score(red_batch(2))


def test_a_refusal_of_one_server_is_not_that_of_all() -> None:
    with Faulty.running(reply("no", "413 Too large")) as faulty, serving() as url:
        both = client([faulty.url, url])
        for seed in range(3):
            assert len(both.score(red_batch(2, seed))) == 2
        with pytest.raises(RemoteFailed, match=r"in 1 attempt: .*HTTP 413"):
            client(faulty.url).score(red_batch(2))


def test_a_server_that_goes_away_between_batches() -> None:
    own = built_in("brightness")["brightness"]
    with serving() as stays, ExitStack() as stack:
        leaves = stack.enter_context(serving())
        both, lonely = client([leaves, stays]), client(leaves)
        for seed in range(8):
            if seed == 3:
                stack.close()
            assert both.score(red_batch(3, seed)) == own.score(red_batch(3, seed))
        with pytest.raises(RemoteFailed, match="Connection refused"):
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


def test_loading_says_what_is_wrong_with_which_server() -> None:
    missing = "does not serve 'brightness'; served are: colour"
    with (
        serving() as good,
        serving(built_in("colour")) as other,
        pytest.raises(RemoteFailed, match=rf"{other}: {missing}"),
    ):
        client([good, other])
    with pytest.raises(RemoteFailed, match=rf"{good}/health: ConnectError"):
        client(good)
    with (
        Faulty.running(b"", health={"status": "ok"}) as stranger,
        pytest.raises(RemoteFailed, match=f"expected a reward server with protocol {PROTOCOL}, got protocol None"),
    ):
        client(stranger.url)
