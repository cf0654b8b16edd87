"""The comparison with other programs takes their statements out of a checkout as they are; here small ones stand in."""

from __future__ import annotations

from pathlib import Path

import pytest

from marble_rl.errors import InputError
from tools.peers.checkout import Checkout

SOURCE = """
import no_such_package
LIMIT: int = 3

def double(x):
    return 2 * x

class Trainer(no_such_package.Base):
    def optimize(self, x):
        return double(x) + LIMIT

def main(_):
    setup()
    for epoch in range(10):
        for i, batch in enumerate(batches):
            seen.append((i, double(batch)))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / "train.py").write_text(SOURCE)
    return Checkout(tmp_path, "--peer", "train.py")


def test_a_loop_runs_by_itself(checkout: Checkout) -> None:
    space: dict[str, object] = {"batches": [5, 7], "seen": []}
    checkout.define("train.py", {"double"}, space)
    checkout.loop("train.py", "main", "batch")(space)
    assert space["seen"] == [(0, 10), (1, 14)]


def test_methods_need_not_their_class(checkout: Checkout) -> None:
    space: dict[str, object] = {}
    checkout.define("train.py", {"double", "LIMIT"}, space)
    checkout.methods("train.py", "Trainer", {"optimize"}, space)
    assert space["optimize"](None, 4) == 11  # type: ignore[operator]


def test_what_is_not_there_is_named(checkout: Checkout, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.py has no missing; another version"):
        checkout.define("train.py", {"missing"}, {})
    with pytest.raises(InputError, match=r"train\.py has no Teacher; another version"):
        checkout.methods("train.py", "Teacher", {"optimize"}, {})
    with pytest.raises(InputError, match=r"has no utils\.py; another version"):
        checkout.define("utils.py", {"double"}, {})
    with pytest.raises(InputError, match=r"main has no loop over samples"):
        checkout.loop("train.py", "main", "samples")
    with pytest.raises(InputError, match=r"--peer: .* has no other\.py; give the folder of a checkout"):
        Checkout(tmp_path, "--peer", "other.py")
    assert checkout.commit == "unknown commit"
