"""A world under torchrun's environment variables, with a single rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from marble_rl.distributed.torchrun import DistributedWorld


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def world(launched: None) -> Iterator[DistributedWorld]:
    world = DistributedWorld()
    yield world
    world.leave(together=True)
    assert not torch.distributed.is_initialized()
