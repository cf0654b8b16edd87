"""Balance sections of version 0.1.0: upgraded where a new rule means the same, refused by name where it is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from marble_rl.config import load_config
from marble_rl.errors import InputError
from runs import base_config


def loaded(tmp_path: Path, balance: dict[str, Any]) -> Any:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**base_config(tmp_path), "balance": balance}))
    return load_config(config).balance


SAVED = {
    "type": "marble",
    "refresh_every": 3,
    "ema_decay": 0.6,
    "smooth": "alpha",
    "solver": "min_norm",
    "apply": "alpha",
    "gradients": "fused",
    "normalize": True,
    "metric": "euclidean",
    "uniform_after": None,
    "probe_weights": {},
}
"""As config.json of a run of 0.1.0 holds it"""


def test_the_papers_rule_is_read_as_it_was_saved(tmp_path: Path) -> None:
    balance = loaded(tmp_path, SAVED)
    assert (balance.type, balance.refresh_every, balance.ema_decay) == ("marble", 3, 0.6)


def test_the_ablation_without_normalisation_is_a_rule(tmp_path: Path) -> None:
    balance = loaded(tmp_path, {**SAVED, "normalize": False})
    assert (balance.type, balance.refresh_every, balance.ema_decay) == ("marble_no_norm", 3, 0.6)


def test_equal_coefficients_over_norms_are_a_rule(tmp_path: Path) -> None:
    balance = loaded(tmp_path, {**SAVED, "solver": "equal", "apply": "alpha_over_norm"})
    assert (balance.type, balance.refresh_every, balance.ema_decay) == ("unit_mean", 3, 0.6)


def test_a_cache_of_scores_is_no_longer_a_setting(tmp_path: Path) -> None:
    tree = base_config(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    plain = load_config(config)
    config.write_text(yaml.safe_dump({**tree, "rewards": [{**reward, "cache": None} for reward in tree["rewards"]]}))
    assert load_config(config) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solver": "noise_aware", "smooth": "gram"}, r"balance\.solver: noise_aware was removed.*marble 0\.1\.0"),
        ({"smooth": "gram"}, r"balance\.smooth: gram was removed.*Remove the key"),
        ({"solver": "equal"}, r"balance\.solver: equal with apply: alpha was removed; use `type: unit_mean`"),
        ({"solver": "frank_wolfe"}, r"balance\.solver: unknown key 'solver'"),
    ],
)
def test_what_is_gone_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        loaded(tmp_path, {**SAVED, **changes})


def test_the_credit_of_geneval_was_its_score(tmp_path: Path) -> None:
    old = {"type": "geneval", "params": {"score": "partial", "detector": "mini"}}
    frames = {"name": "video", "type": "frames", "params": {"reward": old}, "held_out": True}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**base_config(tmp_path), "rewards": [{**old, "name": "objects"}, frames]}))
    objects, video = load_config(config).rewards
    assert objects.params == {"credit": "partial", "detector": "mini"}
    assert video.params["reward"]["params"] == objects.params
