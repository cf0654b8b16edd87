"""Finding rewards by name or path, and checking their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from marble_rl.config import dump_config, load_config
from marble_rl.errors import InputError
from marble_rl.rewards import FilePath, ModelPath, RewardBase, RewardBatch, Scores, Section
from marble_rl.rewards.core.base import Reward
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt

RED_AND_BLACK = np.stack([np.full((8, 8, 3), (255, 0, 0)), np.zeros((8, 8, 3))]).astype(np.uint8)
BATCH = RewardBatch(RED_AND_BLACK, [Prompt(0, "x", "s", {"bonus": 0.5}), Prompt(1, "y", "s")])


def built(kind: str, **params: Any) -> Reward:
    (reward,) = build_rewards([RewardConfig(type=kind, name="r", params=params)]).values()
    return reward


@pytest.mark.parametrize("function", ["steady", "two_arguments", "three_arguments"])
def test_functions_take_what_they_name(function: str) -> None:
    scores = built(f"rewards_for_tests:{function}").score(BATCH)
    assert list(scores) == ([0.5, 0.0] if function == "three_arguments" else [1.0, 0.0])


@pytest.mark.parametrize("function", ["images_only", "prompts_by_name_only", "images_and_others"])
def test_a_function_without_room_for_images_and_prompts_is_refused(function: str) -> None:
    message = rf"rewards\.0 \(r\)\.type: the function rewards_for_tests:{function} takes \(images.*\) -> "
    with pytest.raises(InputError, match=message) as refused:
        build_rewards([RewardConfig(type=f"rewards_for_tests:{function}", name="r")])
    assert "(images, prompts, ...)" in str(refused.value)


def test_a_function_that_takes_anything_is_accepted() -> None:
    assert list(built("rewards_for_tests:anything", bonus=1).score(BATCH)) == [1.0, 0.0]


def test_a_function_that_does_not_say_what_it_takes_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(r\)\.type: .*builtins:max"):
        build_rewards([RewardConfig(type="builtins:max", name="r")])


class Constant(RewardBase):
    """With declared parameters."""

    class Params(Section):
        value: float = 1.0
        """The score."""
        model: ModelPath = "mini"
        """Not used."""
        table: FilePath | None = None
        """Not used."""

    params: Params

    def score(self, batch: RewardBatch) -> Scores:
        return [self.params.value] * len(batch.prompts)


class ByKeyword(Constant):
    """As rewards without `Params` are written: with a constructor."""

    Params = Section  # type: ignore[assignment]

    def __init__(self, value: float, model: str = "mini") -> None:
        self.value, self.model = value, model

    def score(self, batch: RewardBatch) -> Scores:
        return [self.value] * len(batch.prompts)


class Bare(RewardBase):
    """Without parameters."""

    def score(self, batch: RewardBatch) -> Scores:
        return [0.0] * len(batch.prompts)


def test_declared_parameters_reach_the_reward() -> None:
    assert list(built(f"{__name__}:Constant", value=2).score(BATCH)) == [2.0, 2.0]
    assert list(built(f"{__name__}:Constant").score(BATCH)) == [1.0, 1.0]
    assert list(built(f"{__name__}:ByKeyword", value=2).score(BATCH)) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Constant", {"value": "ten"}, 'params.value: expected a valid number, got "ten"'),
        (
            "Constant",
            {"valeu": 1},
            "params.valeu: unknown key 'valeu'. Did you mean 'value'? Valid: value, model, table",
        ),
        (
            "Constant",
            {"value": "x", "model": 3},
            'params.value: expected a valid number, got "x"\n  rewards.0 (r).params.model',
        ),
        ("ByKeyword", {"value": 1, "modle": "x"}, "params.modle: unknown key 'modle'. Did you mean 'model'?"),
        ("ByKeyword", {}, "params.value: is missing; add it"),
        ("Bare", {"value": 1}, "params.value: unknown key 'value'. Valid: none"),
    ],
)
def test_wrong_parameters_are_named_with_their_key(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        built(f"{__name__}:{kind}", **params)
    assert str(refused.value).startswith(f"rewards.0 (r).{message}")


def test_paths_in_parameters_count_from_the_configs_folder(tmp_path: Path) -> None:
    for folder in ("clip", "mini", "detr"):
        (tmp_path / folder).mkdir()
    (tmp_path / "head.pth").touch()
    clip, head = str(tmp_path / "clip"), str(tmp_path / "head.pth")
    photo = {"detector": "photo", "side": 64}
    given_and_loaded = [
        ("aesthetic", {"model": "clip", "head": "head.pth"}, {"model": clip, "head": head}),
        ("clipscore", {"model": "openai/clip-vit-large-patch14"}, {"model": "openai/clip-vit-large-patch14"}),
        ("clipscore", {"model": "mini"}, {"model": "mini"}),
        ("pickscore", {"model": "clip", "divide_by": 26}, {"model": clip, "divide_by": 26}),
        (
            "frames",
            {"reward": {"type": "clipscore", "params": {"model": "clip"}}, "frames": 4},
            {"reward": {"type": "clipscore", "params": {"model": clip}}, "frames": 4},
        ),
        ("geneval", {**photo, "model": "detr"}, {**photo, "model": str(tmp_path / "detr")}),
        (f"{__name__}:Constant", {"model": "clip", "table": "head.pth"}, {"model": clip, "table": head}),
        (f"{__name__}:ByKeyword", {"value": 1, "model": "clip"}, {"value": 1, "model": "clip"}),
        ("not_installed:Reward", {"model": "clip"}, {"model": "clip"}),
        ("ocr", {"mode": "clip"}, {"mode": "clip"}),  # a mistake is left to be reported when the reward is built
    ]
    rewards = [{"name": f"r{i}", "type": t, "params": p} for i, (t, p, _) in enumerate(given_and_loaded)]
    tree = {"model": {"path": "mini"}, "prompts": {"train": [{"name": "x", "texts": ["y"]}]}, "rewards": rewards}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "c.yaml")
    assert [reward.params for reward in config.rewards] == [loaded for _, _, loaded in given_and_loaded]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text(dump_config(config))
    assert load_config(tmp_path / "elsewhere" / "config.json") == config
