"""Judges behind an OpenAI-compatible API, against a real HTTP server on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from chat_servers import (
    ChatStub,
    Handler,
    Reply,
    batch,
    brightness,
    completion,
    failure,
    hangs,
    judge,
    picture,
    question,
    resets,
    says,
    sends,
    stops_halfway,
)
from marble_rl.config import load_scoring_config
from marble_rl.errors import InputError, RewardFailed
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.chat import ChatError
from marble_rl.rewards.remote.judge import Judge
from marble_rl.types import Prompt

CPU = torch.device("cpu")
KEY = "sk-Secret.0123456789"


def test_scores_come_in_the_order_of_the_pictures(server: ChatStub) -> None:
    server.replies = [brightness]
    assert judge(server.url, concurrency=5).score(batch(20)) == pytest.approx([1 + i / 1000 for i in range(20)])


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_requests_at_once_as_allowed(server: ChatStub, concurrency: int) -> None:
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


def test_several_threads_may_score_at_once(server: ChatStub) -> None:
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


def test_what_is_sent(server: ChatStub) -> None:
    reward = Judge(
        url=server.url + "/", model="eye", prompt='{"say": {prompt}} {prompt}', pattern=r"Score: (\d+)", max_tokens=7
    )
    pixels = np.random.default_rng(0).integers(0, 256, (1, 6, 9, 3), dtype=np.uint8)
    assert reward.score(RewardBatch(pixels, [Prompt(0, "{x} \\1 “ü”", "s")])) == [3.0]
    (body,) = server.requests
    assert np.array_equal(picture(body), pixels[0])
    assert question(body) == '{"say": {x} \\1 “ü”} {x} \\1 “ü”'
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("eye", 7, 0)
    assert "Authorization" not in server.headers[0]


def test_unifiedreward_has_its_own_question(server: ChatStub) -> None:
    judge(server.url).score(batch(1, "a red cup"))
    assert question(server.requests[0]).endswith("Caption: [a red cup]")
    assert "'Final Score:'" in question(server.requests[0])


def test_fields_may_be_added_and_left_out(server: ChatStub) -> None:
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
        ("a cup (object): 1\nred (attribute): 0\nFinal Score: 2.4\n", 2.4),
        ("**Final Score:** 4.5", 4.5),
        ("**Final Score: 3**", 3.0),
        ("**Final Score**: 3.5", 3.5),
        ("### final score:\n4", 4.0),
        ("Final Score (1-5): 2", 2.0),
        ("Final Score: [5]", 5.0),
    ],
)
def test_the_last_score_of_a_reply_counts(server: ChatStub, text: str, score: float) -> None:
    server.replies = [says(text)]
    assert judge(server.url).score(batch(1)) == [score]


@pytest.mark.parametrize(
    ("reply", "named", "advice"),
    [
        (says("A fine picture."), "A fine picture.", "correct `pattern`"),
        (says(""), "no match", "correct `pattern`"),
        (says("Final Score: NaN"), "Final Score: NaN", "correct `pattern`"),
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
        (stops_halfway, "received 40 bytes, expected 400", "check that the server runs"),
        (sends(500, "out of memory"), "HTTP 500: out of memory", "server's log"),
        (sends(503, ""), "HTTP 503: no text", "server's log"),
        (sends(429, "slow down"), "HTTP 429: slow down", "lower `concurrency`"),
        (sends(408, "late"), "HTTP 408: late", "says what it refuses"),
        (resets, "ReadError: ", "check that the server runs"),
    ],
)
def test_what_cannot_be_used_is_tried_again_then_an_error(
    server: ChatStub, reply: Reply, named: str, advice: str
) -> None:
    server.replies = [reply]
    error = failure(judge(server.url, retries=2))
    for part in (server.url, named, advice, "(after 3 attempts)"):
        assert part in str(error)
    assert len(server.requests) == 3
    assert len(str(error)) < 700
    server.replies = [reply, reply, says("Final Score: 2")]
    server.requests.clear()
    assert judge(server.url, retries=2).score(batch(1)) == [2.0]


@pytest.mark.parametrize("reply", [says("A fine picture."), says("Final Score: 10"), says("Final Score: 4", "length")])
def test_after_a_reply_that_is_not_understood_it_asks_more_strictly(server: ChatStub, reply: Reply) -> None:
    server.replies = [reply, sends(500, "broken"), reply, says("Final Score: 2")]
    assert judge(server.url).score(batch(1)) == [2.0]
    first, *others = map(question, server.requests)
    assert "nothing else" not in first
    line = "Answer with one line and nothing else: Final Score: N, where N is a number from 1 to 5."
    assert others == [f"{first}\n{line}"] * 3
    assert all((picture(body) == 0).all() for body in server.requests)


def test_a_broken_server_and_other_pictures_are_not_asked_more_strictly(server: ChatStub) -> None:
    def confused_by_the_second(handler: Handler, body: dict[str, Any]) -> None:
        unclear = picture(body)[0, 0, 0] == 1 and "nothing else" not in question(body)
        handler.send(200, completion("Hm." if unclear else "Final Score: 3"))

    server.replies = [sends(500, "broken"), confused_by_the_second]
    reward = judge(server.url, concurrency=1)
    assert reward.score(batch(3)) == [3.0] * 3
    assert ["nothing else" in question(body) for body in server.requests] == [False, False, False, True, False]
    assert reward.repeats == 2


def test_a_judge_of_ones_own_insists_in_its_own_words(server: ChatStub) -> None:
    server.replies = [says("Hm."), says("Score: 7")]
    ask = {"url": server.url, "model": "eye", "prompt": "How good?", "pattern": r"Score: (\d+)", "backoff": 0.001}
    assert Judge(**ask).score(batch(1)) == [7.0]
    assert question(server.requests[1]).startswith("How good?\nAnswer in exactly the form that is asked for above")
    server.requests.clear()
    assert Judge(**ask, insist="A number!").score(batch(1)) == [7.0]
    assert list(map(question, server.requests)) == ["How good?", "How good?\nA number!"]


def test_the_question_may_be_in_a_file(server: ChatStub, tmp_path: Path) -> None:
    (tmp_path / "question.txt").write_bytes("\ufeffHow good?\r\nCaption: [{prompt}] \u00fc\n".encode())
    tree = {
        "name": "eye",
        "type": "unifiedreward",
        "params": {"url": server.url, "model": "eye", "question_file": "question.txt"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"rewards": [tree]}))
    (config,) = load_scoring_config(tmp_path / "config.yaml").rewards
    assert config.params["question_file"] == str(tmp_path / "question.txt")
    reward = build_rewards([config])["eye"]
    assert reward.score(batch(1, "a red cup")) == [3.0]
    assert question(server.requests[0]) == "How good?\nCaption: [a red cup] ü"


@pytest.mark.parametrize("text", ["Score: NaN", "Score: inf", "Score: -1e999", "Score: lots"])
def test_a_loose_pattern_lets_no_nan_through(server: ChatStub, text: str) -> None:
    server.replies = [says(text)]
    assert "correct `pattern`" in str(failure(judge(server.url, pattern=r"Score: (\S+)", retries=0)))


def test_a_group_that_took_no_part_is_no_score(server: ChatStub) -> None:
    server.replies = [says("none")]
    assert "no match" in str(failure(judge(server.url, pattern=r"none|(\d+)", retries=0)))


def test_requests_are_spread_and_a_retry_goes_elsewhere(start: Callable[[], ChatStub]) -> None:
    servers = [start(), start(), start()]
    reward = judge([server.url for server in servers], retries=1)
    assert reward.score(batch(9)) == [3.0] * 9
    assert [len(server.requests) for server in servers] == [3, 3, 3]
    servers[1].replies = [sends(500, "broken")]
    assert reward.score(batch(9)) == [3.0] * 9
    assert [len(server.requests) for server in servers] == [6, 6, 9]


def test_a_failure_names_its_picture_and_ends_the_rest_early(server: ChatStub) -> None:
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


def scorer(server: ChatStub, timeout_of_entry: float | None = None, **params: Any) -> Scorer:
    params = {"url": server.url, "model": "eye", "backoff": 0.001, **params}
    config = RewardConfig(type="unifiedreward", name="eye", timeout=timeout_of_entry, params=params)
    return Scorer([config], build_rewards([config]))


def dislikes_cats(handler: Handler, body: dict[str, Any]) -> None:
    (sends(400, "no") if "cat" in question(body) else says("Final Score: 3"))(handler, body)


def test_a_failure_stops_the_run_and_names_the_prompt(server: ChatStub) -> None:
    server.replies = [dislikes_cats]
    prompts = [Prompt(7, "a cup", "s"), Prompt(8, "a cat", "s")]
    with pytest.raises(RewardFailed, match=r"reward 'eye' failed .* prompt 8 \('a cat'\): ChatError: http://127"):
        scorer(server).score(["eye"], torch.zeros(2, 8, 8, 3, dtype=torch.uint8), prompts, 2)


@pytest.mark.full
def test_a_judge_that_hangs_keeps_no_program_alive(server: ChatStub) -> None:
    """At its end a program waits for threads that are not daemons, and for those of executors."""
    server.replies = [lambda handler, body: server.closing.wait(300)]
    program = f"""
import sys, threading
import numpy as np
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.remote.judge import UnifiedReward
from marble_rl.types import Prompt

batch = RewardBatch(np.zeros((4, 8, 8, 3), np.uint8), [Prompt(0, "a cup", "s")] * 4)
judge = UnifiedReward(url={server.url!r}, model="eye", concurrency=2, timeout=300)
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


def test_no_more_requests_are_made_after_the_deadline_of_a_batch(server: ChatStub) -> None:
    def takes_its_time(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(0.1)
        handler.send(200, completion("Final Score: 3"))

    server.replies = [takes_its_time]
    images = torch.zeros(60, 8, 8, 3, dtype=torch.uint8)
    with pytest.raises(RewardFailed, match="TimeoutError: "):
        scorer(server, timeout_of_entry=0.5, concurrency=2, wait=0).score(["eye"], images, batch(60).prompts, 60)
    time.sleep(0.3)  # for those under way
    asked = len(server.requests)
    time.sleep(0.5)
    assert len(server.requests) == asked < 30


def test_loading_asks_each_server(start: Callable[[], ChatStub]) -> None:
    servers = [start(), start()]
    judge([server.url for server in servers]).load(CPU)
    assert [server.listings for server in servers] == [1, 1]
    assert not servers[0].requests


@pytest.mark.parametrize("listing", [sends(404, "no such page"), sends(405, ""), sends(200, "[]")])
def test_a_server_without_a_list_is_asked_for_a_word(server: ChatStub, listing: Reply) -> None:
    server.listing = listing
    judge(server.url).load(CPU)
    assert len(server.requests) == 1
    server.replies = [sends(404, "nothing here")]
    with pytest.raises(InputError, match=r"'eye' cannot be loaded: ChatError: .*HTTP 404: nothing here.* /v1"):
        scorer(server).load(CPU)


def test_a_model_under_another_name(server: ChatStub) -> None:
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
        (resets, "ReadError"),
    ],
)
def test_a_server_that_is_not_ready_is_found_while_loading(server: ChatStub, listing: Reply, message: str) -> None:
    server.listing = listing
    with pytest.raises(InputError, match=f"{server.url}/models.*{message}"):
        scorer(server, timeout=0.1 if listing is hangs else 10, retries=1).load(CPU)


def test_a_server_that_comes_up_late_is_waited_for(server: ChatStub) -> None:
    ready = server.listing
    server.listing = lambda handler, body: ready(handler, body) if server.listings > 2 else handler.send(503, "loading")
    judge(server.url, retries=2).load(CPU)


def test_the_examples_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unifiedreward.txt").write_text("How good is {prompt}?")
    page = (Path(__file__).parents[3] / "docs" / "rewards" / "judge.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    rewards = [RewardConfig(**entry) for example in examples for entry in yaml.safe_load(example)["rewards"]]
    assert {reward.type for reward in rewards} == {"judge", "unifiedreward"}
    build_rewards(rewards)
    table = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert table == set(Judge.Params.model_fields)
