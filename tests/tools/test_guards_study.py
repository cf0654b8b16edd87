"""Part D of the plan: the judge on results with known answers, and levels of a real run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jobs import result
from marble_rl.compare.methods import specialist
from runs import marble, write_config
from tools.study.guards import FLOORS, GUARDED, LEVELS, OTHERS, SEEDS, UNGUARDED_SEEDS, Levels, judge, main

PLAIN_BY_HAND = {"weights:1,1,1,1,1,0.5": -0.04, "weights:1,1,1,1,1,1": -0.02, "weights:1,1,1,1,1,2": 0.0}
"""And 0.02 with weight 4. Their mean share falls from 1 to 0.4 in even steps."""


def write_job(folder: Path, method: str, seed: int, plain: float, share: float) -> None:
    scores: dict[str, list[float | None]] = {name: [0.2 + 0.1 * share] for name in OTHERS}
    slug = method.replace(":", "_").replace(",", "_")
    result(method, seed, scores | {GUARDED: [-0.5 + plain]}).write(folder / "jobs" / f"{slug}-seed{seed}.json")


def write_level(folder: Path, name: str, level: float) -> None:
    (folder / LEVELS).mkdir(exist_ok=True)
    Levels(prompts=750, base=-0.5, ema=-0.5 + level).write(folder / LEVELS / f"{name}.json")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Every job of part D: guards end at their floor and keep 0.05 more of the share than the frontier."""
    guards, unguarded, alone = (tmp_path / name for name in ("guards", "unguarded", "alone"))
    for method, seeds in SEEDS.items():
        for seed in seeds:
            floor = FLOORS.get(method)
            plain = floor if floor is not None else PLAIN_BY_HAND.get(method, 0.02)
            share = 0.6 - 10 * plain
            if method == "base":
                plain, share = 0.0, 0.0
            write_job(guards, method, seed, plain, share + (0.05 if floor is not None else 0))
            if floor is not None:
                write_level(guards, f"{method}-seed{seed}", floor)
    for seed in UNGUARDED_SEEDS:
        write_job(unguarded, "fair", seed, -0.05, 1.1)
        write_level(unguarded, f"fair-seed{seed}", -0.05)
    for seed in (0, 1):
        write_job(alone, "base", seed, 0.0, 0.0)
        for reward in OTHERS:
            write_job(alone, specialist(reward), seed, 0.0, 1.0)
    return guards, unguarded, alone


def test_guards_that_hold_are_confirmed(folders: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    judged = judge(*folders)
    assert judged.kept("guard_02") == pytest.approx(0.85 / 0.8)  # at -0.02 the frontier is at weight 1
    assert judged.kept("guard_03") == pytest.approx(0.95 / 0.9)  # between two of its points
    assert [": confirmed." in sentence for sentence in judged.sentences] == [True, True, True]
    assert main(["judge", *map(str, folders)]) == 0
    printed = capsys.readouterr().out
    assert "guard_01" in printed
    assert "D1 (not below its floor): confirmed." in printed


def test_each_failure_is_named(folders: tuple[Path, Path, Path]) -> None:
    guards, unguarded, alone = folders
    write_level(guards, "guard_01-seed2", -0.0151)  # one seed is below
    for seed in SEEDS["guard_02"]:
        write_level(guards, f"guard_02-seed{seed}", -0.009)  # too far above
        write_job(guards, "guard_03", seed, -0.03, 0.8)
    held, near, frontier = judge(guards, unguarded, alone).sentences
    assert held == "D1 (not below its floor): not confirmed. More than 0.005 below the floor: 1 of 4 seeds of guard_01."
    assert near == "D2 (near it): not confirmed. More than 0.01 above the floor: guard_02."
    assert frontier.startswith("D3: not confirmed.")
    assert "guard_03 0.89" in frontier


def test_floors_that_bind_nothing_decide_nothing(folders: tuple[Path, Path, Path]) -> None:
    guards, unguarded, alone = folders
    for seed in UNGUARDED_SEEDS:
        write_level(unguarded, f"fair-seed{seed}", 0.0)
    assert "not decided" in judge(guards, unguarded, alone).sentences[1]


def test_nothing_is_judged_before_all_is_there(folders: tuple[Path, Path, Path]) -> None:
    guards, unguarded, alone = folders
    shutil.rmtree(unguarded / LEVELS)
    judged = judge(guards, unguarded, alone)
    assert len(judged.missing) == len(UNGUARDED_SEEDS)
    assert all("not measured yet" in sentence for sentence in judged.sentences)
    shutil.rmtree(unguarded)
    assert len(judge(guards, unguarded, alone).missing) == 2 * len(UNGUARDED_SEEDS), "no job of that folder has ended"


@pytest.mark.full
def test_levels_are_those_on_the_training_prompts(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [{"name": "bright", "type": "brightness"}, {"name": GUARDED, "type": "jpeg_compressibility"}]
    changes = {"balance": {"type": "fair"}, "trainer": {"steps": 2}, "optimizer": {"lr": 0.03}}  # moves whole bytes
    config = write_config(tmp_path / "config.yaml", tiny_sd3, rewards=rewards, **changes)
    out = tmp_path / "out"
    method = "guard_01=balance={type: fair},rewards.1.guard={floor: -0.01}"
    held_out = "prompts.heldout=[{name: other, texts: [a lamp]}]"
    done = marble("compare", config, "--methods", method, "--seeds", "0", "--set", held_out, "--out", out)
    assert done.code == 0, done.err
    assert main(["measure", str(out)]) == 0
    measured = Levels.read(out / LEVELS / "guard_01-seed0.json")
    assert measured.prompts == 7
    assert measured.level != 0
    written = (out / LEVELS / "guard_01-seed0.json").stat().st_mtime_ns
    assert main(["measure", str(out)]) == 0
    assert (out / LEVELS / "guard_01-seed0.json").stat().st_mtime_ns == written, "measured once"
