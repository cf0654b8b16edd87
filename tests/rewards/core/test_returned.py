"""What counts as scores: one real number for each image, and nothing that Python would merely take for one."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from marble_rl.errors import RewardFailed
from marble_rl.rewards.core.base import FunctionReward, NotedScore, RewardBatch
from marble_rl.rewards.core.calls import CalledReward
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt


class LooksLikeANumber:
    def __float__(self) -> float:
        return 0.5


class Huge:
    def __repr__(self) -> str:
        return 5_000_000 * "x"


def scores_of(returned: object) -> list[float | None]:
    reward = FunctionReward(lambda images, prompts: returned)  # type: ignore[arg-type, return-value]
    batch = RewardBatch(np.zeros((2, 4, 4, 3), np.uint8), [Prompt(i, f"prompt {i}", "s") for i in range(2)])
    return CalledReward(RewardConfig(type="x:y", name="r", retries=0), reward).score(batch)


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.25],
        (1, 0.25),
        [True, Fraction(1, 4)],
        [np.float32(1), np.bool_(True) * 0.25],
        [np.int64(1), np.array(0.25)],
        [torch.tensor(1), torch.tensor(0.25, requires_grad=True)],
        np.array([1, 0.25], np.float16),
        np.array([1, 0.25], object),
        torch.tensor([1, 0.25], dtype=torch.bfloat16),
        torch.tensor([1, 0.25], requires_grad=True),
    ],
)
def test_numbers(returned: object) -> None:
    found = scores_of(returned)
    assert found == [1.0, 0.25]
    assert {type(score) for score in found} == {float}


def test_yes_and_no_are_1_and_0() -> None:
    for returned in ([True, False], np.array([True, False]), torch.tensor([True, False]), [np.bool_(True), False]):
        assert scores_of(returned) == [1.0, 0.0]


def test_none_and_notes_stay() -> None:
    none, noted = scores_of([None, NotedScore(0.5, "why")])
    assert none is None
    assert isinstance(noted, NotedScore)
    assert scores_of(np.array([None, 1.0])) == [None, 1.0]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({0: 1.0, 1: 2.0}, r"returned \{0: 1.0, 1: 2.0\} \(dict\) in place of one score for each image: a list,"),
        ({1.0, 2.0}, r"\(set\) in place of"),
        (b"ab", r"returned b'ab' \(bytes\) in place of"),
        ("12", r"returned '12' \(str\) in place of"),
        (range(2), r"\(range\) in place of"),
        ((str(i) for i in range(2)), r"\(generator\) in place of"),
        (None, r"returned None \(NoneType\) in place of"),
        (0.5, r"returned 0.5 \(float\) in place of"),
        (Huge(), r"returned x{200}\.\.\. \(5,000,000 characters\) \(Huge\)"),
        (np.array(["1", "2"]), r"\(ndarray\) in place of"),
        (np.array([1 + 0j, 2]), r"\(ndarray\) in place of"),
        (torch.tensor([1j, 2]), r"returned 1j \(complex\) for image 0 of its batch, not a number"),
        ([1j, 2], r"returned 1j \(complex\) for image 0"),
        ([0.5, "1"], r"returned '1' \(str\) for image 1"),
        ([0.5, b"1"], r"returned b'1' \(bytes\) for image 1"),
        ([0.5, [1.0]], r"returned \[1.0\] \(list\) for image 1"),
        ([0.5, torch.ones(1)], r"\(Tensor\) for image 1 of its batch, not a number"),
        ([0.5, LooksLikeANumber()], r"\(LooksLikeANumber\) for image 1"),
        (torch.ones(2, 1), r"returned an array of shape \[2, 1\]; its shape must be \[images\]"),
        (np.float64(0.5), r"returned .*0.5.* \(float64\) in place of"),
        ([], "returned 0 scores for 2 images"),
        (np.ones(3), "returned 3 scores for 2 images"),
        ([0.5, math.nan], "returned nan for image 1"),
        ([0.5, 10**400], "returned an integer for image 1 of its batch that is beyond all floats"),
        ([0.5, float("-inf")], "returned -inf for image 1"),
        ([0.5, 1e308], r"returned 1e\+308 for image 1 of its batch; scores must lie within ±1e\+30"),
        ([-1.1e30, 0.5], r"returned -1.1e\+30 for image 0"),
    ],
)
def test_anything_else_is_a_failure_of_the_reward(returned: object, says: str) -> None:
    with pytest.raises(RewardFailed, match=f"reward 'r' failed on .*: BadScore: .*{says}"):
        scores_of(returned)
