"""The package that requests are made with is imported when it is used; large bodies arrive whole."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from marble_rl.errors import InputError
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rewards.remote.http_client import CHUNK, is_loopback
from marble_rl.types import Prompt
from reward_servers import built_in, client, serving


@pytest.mark.full
def test_the_modules_of_all_rewards_import_no_http_package() -> None:
    program = """
import sys
import marble_rl
from marble_rl.rewards.core.registry import describe_built_in
assert "judge" in describe_built_in()
print([name for name in ("starlette", "uvicorn", "httpx") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("kind", "params"),
    [("remote", {"url": "http://a", "reward": "r"}), ("unifiedreward", {"url": "http://a/v1"})],
)
def test_a_missing_package_is_named_with_its_extra(
    kind: str, params: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(InputError, match=r"httpx is not installed; run: pip install 'marble-rl\[remote\]'"):
        build_rewards([RewardConfig(type=kind, name="far", params=params)])


def test_a_body_of_several_chunks_arrives_whole() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 512, 900, 3), dtype=np.uint8)
    assert images.nbytes > 3 * CHUNK
    batch = RewardBatch(images, [Prompt(0, "a cup", "s")] * 3)
    with serving() as url:
        assert client(url).score(batch) == built_in("brightness")["brightness"].score(batch)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)
