"""Chat servers for the tests of judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from chat_servers import ChatStub


@pytest.fixture
def start() -> Iterator[Callable[[], ChatStub]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ChatStub.running())


@pytest.fixture
def server(start: Callable[[], ChatStub]) -> ChatStub:
    return start()
