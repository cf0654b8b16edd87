"""Params of the rewards that ask servers: refused by name, with the value and the fix, but never with a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marble_rl.errors import InputError
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.settings import RewardConfig

KEY = "sk-Secret.0123456789"
REMOTE = {"url": "http://127.0.0.1:1", "reward": "brightness"}
JUDGE = {"url": "http://localhost:8000/v1", "model": "eye", "prompt": "How good is {prompt}?", "pattern": r"(\d+)"}


def refusal(kind: str, params: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        build_rewards([RewardConfig(type=kind, name="far", params=params)])
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("url", "127.0.0.1:8765", ["expected an address such as http://127.0.0.1:8765, got '127.0.0.1:8765'"]),
        ("url", "ftp://host", ["expected an address"]),
        ("url", "http://host:99999", ["expected an address"]),
        ("url", [], ["or a list of them, got []"]),
        ("url", [3], ["got 3"]),
        ("reward", "", ["got ''"]),
        ("timeout", 0, ["got 0"]),
        ("retries", -1, ["got -1"]),
        ("retrys", 1, ["unknown", "Did you mean 'retries'?"]),
        ("token_env", "not a name", ["the name, in capitals, of an environment variable"]),
    ],
)
def test_params_of_remote_are_refused_before_a_server_is_asked(name: str, value: Any, parts: list[str]) -> None:
    message = refusal("remote", {**REMOTE, name: value})
    for part in ("rewards.0 (far).params", name, *parts):
        assert part in message


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("url", "", ["got ''"]),
        ("url", [], ["got []"]),
        ("url", 8000, ["got 8000"]),
        ("url", "localhost:8000/v1", ["got 'localhost:8000/v1'", "http://localhost:8000/v1"]),
        ("url", "ftp://localhost/v1", ["expected an address"]),
        ("url", "http://local host/v1", ["expected an address"]),
        ("url", "http://localhost:99999/v1", ["expected an address"]),
        ("url", ["http://localhost:1/v1", None], ["got None"]),
        ("url", "http://localhost/v1/chat/completions", ["leave /chat/completions out"]),
        ("model", " ", ["got ' '"]),
        ("prompt", "", ["got ''"]),
        ("prompt", "How good is {promt}?", ["{promt} is not filled in; write {prompt}"]),
        ("pattern", "(", ["'(' is not a regular expression"]),
        ("pattern", r"\d+", ["has 0 groups", "put the score"]),
        ("pattern", r"(a|b): (\d+)", ["has 2 groups", "(?:...)"]),
        ("scale", [1], ["such as [1, 5], got [1]"]),
        ("scale", [5, 1], ["got [5, 1]"]),
        ("scale", ["low", "high"], ["got ['low', 'high']"]),
        ("scale", [0, float("nan")], ["got [0, nan]"]),
        ("scale", 5, ["got 5"]),
        ("concurrency", 0, ["got 0"]),
        ("concurrency", 2.5, ["got 2.5"]),
        ("concurrency", True, ["got"]),
        ("retries", -1, ["got -1"]),
        ("backoff", -1, ["got -1"]),
        ("timeout", 0, ["got 0"]),
        ("timeout", float("inf"), ["got"]),
        ("timeout", None, ["got"]),
        ("max_tokens", 0, ["got 0"]),
        ("temperature", -0.5, ["got -0.5"]),
        ("image_format", "gif", ["gif", "png", "jpeg"]),
        ("extra", "seed", ["got", "seed"]),
    ],
)
def test_params_of_judge_are_refused_by_name(name: str, value: Any, parts: list[str]) -> None:
    message = refusal("judge", {**JUDGE, name: value})
    for part in ("rewards.0 (far).params", f"{name}: ", *parts):
        assert part in message


@pytest.mark.parametrize("name", JUDGE)
def test_a_missing_param_is_named(name: str) -> None:
    message = refusal("judge", {key: value for key, value in JUDGE.items() if key != name})
    assert f"{name}: is missing" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key_env", KEY),
        ("api_key_env", "hf_abcdefgh"),
        ("api_key_env", 1234),
        ("url", f"http://user:{KEY}@localhost/v1"),
        ("url", f"http://localhost/v1?key={KEY}"),
        ("url", ["http://localhost/v1", f"http://localhost/v1#{KEY}"]),
    ],
)
def test_a_key_in_the_config_is_refused_and_not_repeated(name: str, value: Any) -> None:
    message = refusal("judge", {**JUDGE, name: value})
    assert "environment variable" in message
    assert KEY not in message
    assert str(value) not in message


def test_a_question_may_be_about_the_picture_alone() -> None:
    params = {**JUDGE, "prompt": 'How sharp? Answer {"score": 3}.'}
    assert list(build_rewards([RewardConfig(type="judge", name="far", params=params)])) == ["far"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("a folder", "Is a directory"),
        (b"", "it holds no {prompt}"),
        (b"How good is it?", "it holds no {prompt}"),
        (b"How good is {promt}?", "it holds no {prompt}"),
        (rb"How good?\nCaption: {prompt}", "a backslash and an n"),
        (b"\xff\xfeH\x00o\x00w\x00", "can't decode byte 0xff"),
        (b"{prompt}" + 100_000 * b" ", "at most 100,000 are read"),
    ],
)
@pytest.mark.parametrize("kind", ["judge", "unifiedreward"])
def test_a_bad_question_file_is_named_with_the_fix(
    kind: str, content: bytes | str | None, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "question.txt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        file.mkdir()
    message = refusal(kind, {**{key: JUDGE[key] for key in ("url", "model", "pattern")}, "question_file": str(file)})
    assert message.startswith(f"rewards.0 (far).params.question_file: {str(file)!r} cannot be used (")
    assert says in message
    assert message.endswith("and {prompt} where the picture's prompt belongs")


@pytest.mark.parametrize("kind", ["judge", "unifiedreward"])
def test_there_is_one_question(kind: str) -> None:
    message = refusal(kind, {**JUDGE, "question_file": "question.txt"})
    assert "params.prompt: the question is also in question_file, 'question.txt'; remove one of the two" in message
    message = refusal(kind, {**JUDGE, "prompt": None})
    assert "params.prompt: is missing; add it, or name a file with the question in question_file" in message
