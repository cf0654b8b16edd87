"""The documentation keeps its word: Python blocks run, commands name real settings, links and metrics exist."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from marble_rl import load_config
from marble_rl.evaluation.evaluate import Evaluation
from marble_rl.evaluation.report import score_record
from marble_rl.prompts import read_prompt_file
from marble_rl.rewards.core.base import FunctionReward, RewardBatch
from marble_rl.types import Prompt, RewardTable
from runs import train, write_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
ALWAYS = {"harmonizer.md"}
"""Pages whose every Python block is run; elsewhere only those with `<!-- tested -->` on the line before."""

BLOCK = re.compile(r"^(?P<mark><!-- tested -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
SHELL = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of the blocks of a page that are to be run."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start("code")].count("\n") + 1, found["code"])
        for found in BLOCK.finditer(text)
        if found["mark"] or page.name in ALWAYS
    ]


@functools.cache
def run(page: Path, line: int, code: str) -> dict[str, Any]:
    """Execute a block once, in a namespace of its own; a traceback shows the page's own line numbers."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n" * (line - 1) + code, str(page), "exec", dont_inherit=True), namespace)
    return namespace


def train_commands(page: Path) -> list[list[str]]:
    """Arguments of every `marble train configs/...` in a page's shell blocks."""
    lines = "".join(SHELL.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    starts = [(words, i) for words in commands for i in range(len(words)) if words[i : i + 2] == ["marble", "train"]]
    return [words[i + 2 :] for words, i in starts if words[i + 2].startswith("configs/")]


BLOCKS = [(page, line, code) for page in PAGES for line, code in python_blocks(page)]
COMMANDS = [(page, arguments) for page in PAGES for arguments in train_commands(page)]


@pytest.mark.parametrize(("page", "line", "code"), BLOCKS, ids=[f"{page.name}:{line}" for page, line, _ in BLOCKS])
def test_block_runs(page: Path, line: int, code: str) -> None:
    run(page, line, code)


@pytest.mark.parametrize("index", [1, 2, 4], ids=["plain PyTorch", "DiffusionNFT loop", "accelerate"])
def test_harmonizer_examples_improve_every_reward(index: int) -> None:
    page = ROOT / "docs" / "harmonizer.md"
    names = run(page, *python_blocks(page)[index])
    assert len(names["first"]) == len(names["harmonizer"].rewards) == 3
    assert (names["last"] > names["first"] + 0.1).all()


def test_reward_of_the_tutorial_scores_what_it_says() -> None:
    page = ROOT / "docs" / "adding_a_reward.md"
    *_, (line, code) = python_blocks(page)
    reward = FunctionReward(run(page, line, code)["symmetry"])
    half = np.random.default_rng(0).integers(0, 256, size=(8, 4, 3), dtype=np.uint8)
    mirrored = np.concatenate([half, half[:, ::-1]], axis=1)
    lopsided = np.concatenate([half, 255 - half], axis=1)
    prompt = Prompt(0, "a kite", "things")
    symmetric, asymmetric = reward.score(RewardBatch(np.stack([mirrored, lopsided]), [prompt, prompt]))
    assert symmetric == 0.0
    assert -1.0 <= asymmetric < -0.1


@pytest.mark.parametrize(
    ("page", "block", "settings"),
    [
        ("adding_a_rule.md", 0, {"balance": {"type": "part_0:Lagging", "power": 2.0}}),
        ("adding_a_rule.md", 1, {"balance": {"type": "part_1:MedianLength"}}),
        ("adding_a_loss.md", 0, {"loss": {"type": "part_2:Awm", "timesteps_per_sample": 1}}),
    ],
    ids=["rule", "rule with gradients", "loss"],
)
def test_the_rules_and_the_loss_of_the_tutorials_train(
    tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, block: int, settings: dict[str, Any]
) -> None:
    ((section, values),) = settings.items()
    code = [found["code"] for found in BLOCK.finditer((ROOT / "docs" / page).read_text(encoding="utf-8"))][block]
    (tmp_path / f"{values['type'].partition(':')[0]}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = write_config(tmp_path / "config.yaml", tiny_sd3, **settings)
    train(config, tmp_path / "run", "--set", "trainer.steps=2")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert section in (tmp_path / "run" / "config.json").read_text()


def test_the_reward_with_a_path_scores_what_it_says(tmp_path: Path) -> None:
    page = ROOT / "docs" / "adding_a_reward.md"
    (line, code), *_ = python_blocks(page)
    (tmp_path / "palette.txt").write_text("255 0 0\n0 0 255\n")
    reward = run(page, line, code)["Palette"](palette=tmp_path / "palette.txt")
    reward.load(torch.device("cpu"))
    images = np.zeros((2, 8, 8, 3), dtype=np.uint8)
    images[0, ..., 2] = 255
    prompt = Prompt(0, "a kite", "things")
    blue, black = reward.score(RewardBatch(images, [prompt, prompt]))
    assert blue == 1.0
    assert black == pytest.approx(np.exp(-255 / 64))


def test_the_reward_with_a_note_says_what_it_saw() -> None:
    page = ROOT / "docs" / "adding_a_reward.md"
    _, (line, code), _ = python_blocks(page)
    images = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    images[:, :2] = 255
    (score,) = FunctionReward(run(page, line, code)["bright"]).score(RewardBatch(images, [Prompt(0, "a kite", "s")]))
    assert (score, score.note) == (0.25, "25% bright pixels")


def test_generated_prompts_of_the_prompts_page_can_be_kept_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "prompts.md"
    (line, code), _ = python_blocks(page)
    run.__wrapped__(page, line, code)
    (tmp_path / "made.jsonl").write_text(capsys.readouterr().out)
    tags = [prompt.metadata["tag"] for prompt in read_prompt_file(tmp_path / "made.jsonl").prompts]
    assert len(tags) == 100
    assert 60 < tags.count("counting") < 73


def test_geneval_score_of_the_prompts_page_is_the_mean_over_tasks(tmp_path: Path) -> None:
    page = ROOT / "docs" / "prompts.md"
    _, (line, code) = python_blocks(page)
    include = [{"class": "cup", "count": 1}]
    tags = ["colors", "counting", "counting"]
    lines = [json.dumps({"tag": tag, "include": include, "prompt": "a cup"}) for tag in tags]
    (tmp_path / "evaluation_metadata.jsonl").write_text("\n".join(lines))
    prompts = read_prompt_file(tmp_path / "evaluation_metadata.jsonl").prompts
    scores = torch.tensor([[1.0], [1.0], [1.0], [0.0], [0.0], [0.0]])  # two images of each prompt
    table = RewardTable(("geneval",), scores, torch.ones_like(scores, dtype=torch.bool))
    result = Evaluation(prompts, 2, table)
    score_record({"ema": result}, None, []).write(tmp_path / "scores.json")
    found = run(page, line, code)["geneval_by_task"](tmp_path / "scores.json", tmp_path / "evaluation_metadata.jsonl")
    assert found == {"colors": 1.0, "counting": 0.25, "overall": 0.625}


@pytest.mark.parametrize(
    ("page", "arguments"), COMMANDS, ids=[f"{page.name}-{i}" for i, (page, _) in enumerate(COMMANDS)]
)
def test_train_command_is_a_valid_config(page: Path, arguments: list[str]) -> None:
    config, *rest = arguments
    overrides = [rest[i + 1] for i, word in enumerate(rest) if word == "--set"]
    load_config(ROOT / config, overrides)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    """And to headings in them."""
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.full
def test_metrics_page_names_what_a_run_logs(config_file: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*/(?:<name>|[a-z_]+))`", page))
    documented |= {f"ws_{key}" for key in documented if re.match("(harmony|heldout)/", key)}

    # Nothing is learnt, so that the second evaluation scores the images of the first.
    every_key = ("trainer.eval_every=3", "optimizer.lr=1.0e-30", "rewards.1.clip=[0.0,0.01]")
    every_key += ("prompts.validation=[{name: new, texts: [a lamp, a red bell]}]",)
    every_key += ("rewards.2.held_out=true", "rewards.2.watch={}", "optimizer.non_finite=skip")
    lines: list[str] = []
    for name, rule in {"paper": (), "fair": ("balance={type: fair}",)}.items():
        train(config_file, tmp_path / name, *(word for setting in (*every_key, *rule) for word in ("--set", setting)))
        lines += (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    rewards = "|".join(reward.name for reward in load_config(config_file).rewards)
    logged = {re.sub(f"/({rewards})$", "/<name>", key) for line in lines for key in json.loads(line)} - {"step"}
    # several processes, float16, guards
    elsewhere = {"time/waiting", "guard/overflows", "guard/loss_scale", "time/base_images"}
    assert logged == documented - elsewhere


def test_every_launch_line_sets_the_threads_of_a_rank() -> None:
    """torchrun sets one thread where OMP_NUM_THREADS is not set."""
    launching = [*PAGES, *(ROOT / "configs").glob("*.yaml"), *(ROOT / "src").rglob("*.py")]
    lines = [line for file in launching for line in file.read_text(encoding="utf-8").splitlines()]
    launches = [line for line in lines if "torchrun --" in line]
    assert len(launches) >= 6
    assert not [line for line in launches if "OMP_NUM_THREADS=8 torchrun --" not in line]
    assert "export OMP_NUM_THREADS=" in (ROOT / "scripts" / "train.sbatch").read_text()
