"""A balancing rule and a loss from outside, by import path in the config: no file of the package is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import base_config, lora_bytes, marble, metrics, train, write_config

RULE = {"type": "parts_for_tests:Loudest", "boost": 0.5}
LOSS = {"type": "parts_for_tests:Pull", "power": 1.5}


@pytest.fixture
def config(tiny_sd3: Path, tmp_path: Path) -> Path:
    loss = {**base_config(tiny_sd3).get("loss", {}), **LOSS}
    return write_config(tmp_path / "config.yaml", tiny_sd3, balance=RULE, loss=loss)


def test_a_rule_and_a_loss_from_outside_train_and_resume(config: Path, tmp_path: Path) -> None:
    train(config, tmp_path / "whole", "--set", "trainer.steps=4")
    lines = metrics(tmp_path / "whole")
    assert [("loudest/chosen" in line, "harmony/min_cos" in line) for line in lines] == [
        (True, True),
        (False, False),
    ] * 2
    assert all(line["update/norm"] > 0 for line in lines)

    train(config, tmp_path / "part", "--set", "trainer.steps=3")
    train(config, tmp_path / "part", "--set", "trainer.steps=4", "--resume")
    assert lora_bytes(tmp_path / "part") == lora_bytes(tmp_path / "whole")

    outcome = marble("report", tmp_path / "whole")
    assert outcome.code == 0, outcome.err
    assert "by the one with the longest gradient" in (tmp_path / "whole" / "report.html").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("balance.boots=2", "balance.boots: unknown key 'boots'. Did you mean 'boost'?"),
        ("balance.boost=-1", "balance.boost: expected a number greater than 0, got -1"),
        ("loss.power=high", 'loss.power: expected a valid number, got "high"'),
        ("loss.beta=0.1", "loss.beta: unknown key 'beta'."),
        ("balance.type=marbel", "balance.type: unknown type 'marbel'. Did you mean 'marble'?"),
        ("balance.type=parts_for_tests:Loudst", "balance.type: 'parts_for_tests' has no 'Loudst'. Did you mean"),
        ("balance.type=parts_for_tests:NotARule", "balance.type: parts_for_tests:NotARule is not a class derived from"),
        ("balance={type: 'parts_for_tests:Speechless'}", "Speechless needs gradients but does not implement `weigh`"),
        ("loss.type=parts_for_tests:Loudest", "loss.type: parts_for_tests:Loudest is not a class derived from"),
        ("loss.type=nowhere:Thing", "loss.type: cannot import 'nowhere' (ModuleNotFoundError"),
        ("balance.type=3", "balance.type: expected a name, got 3"),
        ("balance=loudest", "balance: "),
    ],
)
def test_what_is_wrong_with_a_plug_in_is_named_before_a_model_is_loaded(
    config: Path, tmp_path: Path, override: str, message: str
) -> None:
    outcome = marble("train", config, "--set", override, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert message in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("where", "code", "saved"),
    [
        ("check", 2, None),
        pytest.param("__init__", 3, None, marks=pytest.mark.full),
        ("weigh", 3, 2),
        # The weights have changed, but the rule has not: they must not be saved together.
        pytest.param("commit", 3, None, marks=pytest.mark.full),
        pytest.param("state_dict", 3, None, marks=pytest.mark.full),
    ],
)
def test_a_rule_that_ends_the_program_is_named(
    config: Path, tmp_path: Path, where: str, code: int, saved: int | None
) -> None:
    """Exit code 0 means that the run is complete, whatever the code of others does."""
    rule = f"balance={{type: 'parts_for_tests:Quits', where: {where}}}"
    outcome = marble("train", config, "--set", rule, "--set", "trainer.steps=4", "--out", tmp_path / "run")
    assert outcome.code == code, outcome.err
    assert "balance.type: parts_for_tests:Quits raised SystemExit: 0" in outcome.err
    folder = tmp_path / "run" / "checkpoints"
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")] if folder.exists() else []
    assert steps == ([] if saved is None else [saved])


@pytest.mark.full
def test_a_loss_that_raises_is_named(config: Path, tmp_path: Path) -> None:
    outcome = marble("train", config, "--set", "loss={type: 'parts_for_tests:Broken'}", "--out", tmp_path / "run")
    assert outcome.code == 3, outcome.err
    assert "loss.type: parts_for_tests:Broken raised KeyError: 'nothing here'" in outcome.err


def test_a_command_in_which_other_code_ends_the_program_has_failed(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever that code runs: here in the estimate of the memory that a loss needs."""
    (tmp_path / "quits_anywhere.py").write_text(
        "import sys\nfrom parts_for_tests import Pull\n"
        "class Quits(Pull):\n  def terms(self, v_theta, v_old, sample):\n    sys.exit(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    outcome = marble("config", "show", config, "--set", "loss={type: 'quits_anywhere:Quits'}")
    assert outcome.code == 70
    assert "internal error: SystemExit: 0" in outcome.err


def test_settings_whose_check_ends_the_program_are_bad_input(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits_in_settings.py").write_text(
        "import sys\nfrom pydantic import field_validator\nfrom parts_for_tests import Pull, PullSettings\n"
        "class Odd(PullSettings):\n  @field_validator('power')\n  @classmethod\n"
        "  def _check(cls, value):\n    sys.exit(0)\n"
        "class Quits(Pull):\n  Settings = Odd\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    outcome = marble("config", "check", config, "--set", "loss={type: 'quits_in_settings:Quits', power: 2}")
    assert outcome.code == 2
    assert "loss: the settings raised SystemExit: 0" in outcome.err
