"""Requests to chat servers that refuse, hang, break or ask for patience; and the key, which is never shown."""

from __future__ import annotations

import socket
import time
import traceback
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import numpy as np
import pytest
import torch

from chat_servers import (
    ChatStub,
    Reply,
    batch,
    failure,
    hangs,
    judge,
    says,
    sends,
    trickles,
)
from marble_rl.errors import InputError
from marble_rl.rewards.remote.chat import retry_after

CPU = torch.device("cpu")
KEY = "sk-Secret.0123456789"


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (400, "take pictures"),
        (401, "api_key_env"),
        (403, "api_key_env"),
        (404, "/v1"),
        (422, "refuses"),
        (302, "redirects are not followed"),
    ],
)
def test_a_refusal_is_not_tried_again(server: ChatStub, status: int, advice: str) -> None:
    server.replies = [sends(status, "no", Location="http://127.0.0.1:9/v1/chat/completions"), says("Final Score: 3")]
    error = failure(judge(server.url))
    assert f"{server.url}/chat/completions answered with HTTP {status}: no; " in str(error)
    assert advice in str(error)
    assert "attempt" not in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("reply", [hangs, trickles])
def test_a_server_that_hangs_costs_no_more_than_the_timeout(server: ChatStub, reply: Reply) -> None:
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
        assert f"{url}/chat/completions: ConnectError" in str(failure(judge(url)))


def test_pauses_double(server: ChatStub) -> None:
    server.replies = [sends(500, "no"), sends(500, "no"), sends(500, "no"), says("Final Score: 3")]
    judge(server.url, backoff=0.05).score(batch(1))
    pauses = np.diff(server.times)
    assert all(low <= pause for low, pause in zip((0.025, 0.05, 0.1), pauses, strict=True))
    assert pauses.sum() < 5


def test_retry_after_is_waited_for(server: ChatStub) -> None:
    server.replies = [sends(429, "slow down", Retry_After="1"), says("Final Score: 3")]
    assert judge(server.url).score(batch(1)) == [3.0]
    assert np.diff(server.times) >= 1.0


def test_retry_after_as_a_date_or_as_nonsense() -> None:
    soon = datetime.now(timezone.utc) + timedelta(seconds=30)
    assert 28 < retry_after(format_datetime(soon, usegmt=True)) <= 30
    assert retry_after(format_datetime(soon - timedelta(days=1), usegmt=True)) == 0
    assert retry_after(" 7 ") == 7
    for nonsense in (None, "", "soon", "-1", "nan", "inf", "1e9", "9" * 5000, "Mon, 99 Foo 2020 00:00:00 GMT"):
        assert retry_after(nonsense) == 0


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_the_key_is_sent_and_never_shown(server: ChatStub, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("value", [None, "", " ", f"{KEY} {KEY}", f"{KEY}\nX: y", f"{KEY}\x7f"])
def test_a_key_that_cannot_be_sent(server: ChatStub, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(InputError, match="api_key_env: the environment variable 'JUDGE_KEY'") as caught:
        judge(server.url, api_key_env="JUDGE_KEY").load(CPU)
    assert KEY not in shown(caught.value)
    assert not server.listings


def test_a_proxy_is_not_asked_for_this_machine(server: ChatStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert judge(server.url).score(batch(1)) == [3.0]
