"""Recipes: listed, copied and trained by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from marble_rl.config import load_config
from runs import TESTS, marble

CONFIGS = TESTS.parents[1] / "configs"


def test_recipes_are_listed_with_one_line_each() -> None:
    outcome = marble("init")
    assert outcome.code == 0
    lines = {line.split()[0]: line for line in outcome.out.splitlines() if "(card: " in line}
    assert list(lines)[:2] == ["mini-demo", "mini"]
    assert {"sd35-medium", "sd35-medium-24gb", "flux-dev", "qwen-image", "wan21-t2v-1.3b"} <= lines.keys()
    assert {"wan22-ti2v-5b", "wan22-t2v-a14b"} <= lines.keys()
    assert "24 GB" in lines["sd35-medium-24gb"]
    assert "licence" in lines["flux-dev"]


@pytest.mark.parametrize("name", ["mini-demo", "sd35-medium-24gb", "wan21-t2v-1.3b"])
def test_a_copied_recipe_is_the_recipe_and_takes_the_example_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    outcome = marble("init", name, "--out", tmp_path / "new")
    assert outcome.code == 0, outcome.err
    assert f"cd {tmp_path / 'new'}\n" in outcome.out
    assert f"marble train {name}.yaml" in outcome.out
    copied, original = load_config(tmp_path / "new" / f"{name}.yaml"), load_config(name)
    assert copied.rewards == original.rewards
    assert marble("config", "check", tmp_path / "new" / f"{name}.yaml").code == 0
    for file in (tmp_path / "new").rglob("*"):
        if file.is_file() and file.suffix != ".yaml":
            assert file.read_bytes() == (CONFIGS / file.relative_to(tmp_path / "new")).read_bytes()

    text = (tmp_path / "new" / f"{name}.yaml").read_text()
    (tmp_path / "new" / "own.yaml").write_text(text.replace("  # - {name: mine", "  - {name: mine"))
    monkeypatch.chdir(tmp_path / "new")
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    assert load_config("own.yaml").rewards[0].name == "mine"
    again = marble("init", name)
    assert again.code == 0, "the same files once more"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("mine = 1\n")
    outcome = marble("init", "mini-demo", "--out", tmp_path)
    assert outcome.code == 2
    assert str(tmp_path / "my_rewards.py") in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["my_rewards.py"]


def test_unknown_names(tmp_path: Path) -> None:
    outcome = marble("init", "minidemo", "--out", tmp_path)
    assert outcome.code == 2
    assert "Did you mean 'mini-demo'?" in outcome.err
    outcome = marble("train", "minidemo")
    assert outcome.code == 2
    assert "neither a file nor a recipe. Did you mean 'mini-demo'?" in outcome.err


def test_a_recipe_is_checked_by_its_name() -> None:
    outcome = marble("config", "check", "mini-rare")
    assert outcome.code == 0, outcome.err


def test_a_folder_of_the_same_name_does_not_hide_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert marble("init", "mini-demo", "--out", "mini-demo").code == 0
    assert marble("config", "check", "mini-demo").code == 0
