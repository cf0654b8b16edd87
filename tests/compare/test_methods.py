"""What methods change in a config, and how --methods and --seeds name them."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from marble_rl.balancing.marble import MarbleSettings
from marble_rl.balancing.sequential import SequentialSettings
from marble_rl.compare.jobs import plan_jobs
from marble_rl.compare.methods import known_methods, method_sets, sequential_stages, tuned_weights
from marble_rl.compare.selection import select_methods, select_seeds
from marble_rl.config import load_config
from marble_rl.errors import InputError
from marble_rl.runs.inputs import check_inputs
from tools.study.claims import UNSCALED

CONFIGS = Path(__file__).parents[2] / "configs"
MINI = CONFIGS / "mini.yaml"
FIVE = ["clipscore", "pickscore", "hpsv2", "ocr", "geneval"]


def named(*methods: str, steps: int = 60) -> dict[str, list[str]]:
    """{method: overrides} on configs/mini.yaml."""
    selected = select_methods(methods, load_config(MINI, [f"trainer.steps={steps}"]))
    return {method.name: list(method.overrides) for method in selected}


def test_every_method_is_a_valid_config() -> None:
    methods = named("all", "config", "specialists")
    assert set(known_methods(FIVE)) | {"weights:1,1,1,2,2"} == set(methods)
    for name, overrides in methods.items():
        config = load_config(MINI, overrides)
        kept = config.model_copy(update={"balance": load_config(MINI).balance})
        if name == "base":
            check_inputs(config)
        else:
            assert kept == load_config(MINI), f"{name} changes more than the balance"


def test_marble_is_the_papers_whatever_the_config_says() -> None:
    balances = {name: load_config(MINI, overrides).balance for name, overrides in named("all", "config").items()}
    paper = MarbleSettings(refresh_every=10, ema_decay=0.7)
    assert balances["marble"] == paper
    assert balances["config"] == MarbleSettings(refresh_every=5)
    changed = {
        "marble_every_step": {"refresh_every": 1},
        "marble_n5": {"refresh_every": 5},
        "marble_n20": {"refresh_every": 20},
        "marble_rho01": {"ema_decay": 0.1},
        "marble_rho09": {"ema_decay": 0.9},
        "marble_alpha_over_norm": {"apply": "alpha_over_norm"},
        "marble_late_uniform": {"uniform_after": 48},
    }
    assert {name for name in balances if name.startswith("marble_")} - {"marble_no_norm"} == changed.keys()
    for name, change in changed.items():
        assert balances[name] == paper.model_copy(update=change)


def test_the_papers_schedule_is_scaled() -> None:
    assert sequential_stages("abc", 1600) == [("a", 800), ("b", 300), ("a", 200), ("b", 200), ("c", 100)]
    assert sequential_stages("abcde", 1800)[4:] == [("c", 100), ("d", 100), ("e", 100)]
    assert sequential_stages("ab", 15) == [("a", 8), ("b", 3), ("a", 2), ("b", 2)]


@pytest.mark.parametrize("steps", [1, 2, 7, 24, 60, 1000])
@pytest.mark.parametrize("rewards", [1, 2, 3, 5, 9])
def test_stages_fill_the_budget(steps: int, rewards: int) -> None:
    stages = sequential_stages([f"r{i}" for i in range(rewards)], steps)
    assert sum(length for _, length in stages) == steps
    assert all(length > 0 for _, length in stages)
    if steps >= 60:
        assert len({reward for reward, _ in stages}) == rewards


def test_sequential_uses_the_steps_of_the_comparison() -> None:
    balance = load_config(MINI, named("sequential", steps=18)["sequential"]).balance
    assert isinstance(balance, SequentialSettings)
    assert [(stage.reward, stage.steps) for stage in balance.stages] == [
        *(("clipscore", 8), ("pickscore", 3), ("clipscore", 2), ("pickscore", 2)),
        *(("hpsv2", 1), ("ocr", 1), ("geneval", 1)),
    ]


def test_weights_double_the_last_two_fifths() -> None:
    assert [tuned_weights(k) for k in (2, 3, 5, 10)] == [
        "weights:1,2",
        "weights:1,1,2",
        "weights:1,1,1,2,2",
        "weights:1,1,1,1,1,1,2,2,2,2",
    ]
    assert "weights" not in " ".join(method_sets(["a"])["ablations"])


def test_names_sets_weights_and_own_methods_can_be_mixed() -> None:
    own = "mine=optimizer.lr=1e-3,balance={type: fixed, coefficients: {ocr: 0.5, geneval: 0.5}},loss.beta=1"
    chosen = named("base,weights:1,1,1,2,2.5,marble", own, "gdpo,marble,hot=optimizer.lr=1e-2")
    assert list(chosen) == ["base", "weights:1,1,1,2,2.5", "marble", "mine", "gdpo", "hot"]
    assert chosen["mine"] == [
        "optimizer.lr=1e-3",
        "balance={type: fixed, coefficients: {ocr: 0.5, geneval: 0.5}}",
        "loss.beta=1",
    ]
    assert chosen["hot"] == ["optimizer.lr=1e-2"]
    assert load_config(MINI, chosen["mine"]).loss.beta == 1


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (["marbel"], "unknown method 'marbel'. Did you mean 'marble'?"),
        (["only-clip"], "Did you mean 'only-clipscore'?"),
        (["weights_11122"], "Did you mean 'weights:1,1,1,1,1'?"),
        (["weights:1,2"], "one number for each of clipscore, pickscore, hpsv2, ocr, geneval"),
        (["weights:1,1,1,1,x"], "must give one number"),
        (["only-aesthetic"], "unknown method 'only-aesthetic'"),
        (["marble,3"], "'3' after 'marble' means nothing"),
        (["marble=optimizer.lr=1"], "'marble' is a method already"),
        (["mine=trainer.seed=3"], "the same for all methods"),
        (["mine=evaluation.steps=3"], "the same for all methods"),
        (["mine=evaluation={steps: 3}"], "the same for all methods"),
        (["mine=prompts.heldout=[]"], "the same for all methods"),
        (["mine=rewards.0.params={divide_by: 2}"], "the same for all methods"),
        (["mine=rewards.0.params.divide_by=2"], "the same for all methods"),
        (["a=loss.beta=1", "a=loss.beta=2"], "'a' is there twice"),
        ([","], "names none"),
    ],
)
def test_bad_methods_are_named(methods: list[str], says: str) -> None:
    with pytest.raises(InputError) as caught:
        named(*methods)
    assert says in str(caught.value)


def test_seeds() -> None:
    assert select_seeds("0-2,7, 2") == [0, 1, 2, 7]
    for bad in ("", "a", "3-1", "-1", "0,"):
        with pytest.raises(InputError, match="--seeds"):
            select_seeds(bad)


def planned(config: str, words: list[str], out: Path) -> set[str]:
    """Names of the jobs that a command line plans."""
    given = {key: [v for k, v in itertools.pairwise(words) if k == key] for key in ("--set", "--methods", "--seeds")}
    (seeds,) = given["--seeds"]
    jobs = plan_jobs(CONFIGS.parent / config, given["--set"], given["--methods"], select_seeds(seeds), out)
    return {job.name for job in jobs}


def test_the_commands_of_the_page_are_plans(tmp_path: Path) -> None:
    page = (CONFIGS.parent / "docs" / "compare.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^marble compare (configs/.*)$", page, re.MULTILINE)]
    assert [len(planned(config, words, tmp_path)) for config, *words in commands] == [60, 40, 30, 10, 3]


@pytest.mark.full
def test_the_study_has_five_seeds_of_the_main_methods_and_three_of_the_others(tmp_path: Path) -> None:
    script = (CONFIGS.parent / "scripts" / "study.sh").read_text(encoding="utf-8")
    commands = re.findall(r"^compare (--.*)$", script, re.MULTILINE)
    jobs = set().union(*(planned("configs/mini-study.yaml", shlex.split(line), tmp_path) for line in commands))
    study = CONFIGS / "mini-study.yaml"
    seeds = {"base": range(5), "specialists": range(5), "joint": range(5), "ablations": range(3), "variants": range(3)}
    seeds["marble_alpha_over_norm"] = range(5)  # led with three
    seeds[UNSCALED] = range(3)
    assert jobs == {job.name for name, n in seeds.items() for job in plan_jobs(study, [], [name], n, tmp_path)}
