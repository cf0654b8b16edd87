"""Every family through the command line: its recipe, shrunk to a tiny pipeline, trains, is evaluated and exported, and
plain diffusers with the exported LoRA draws what we draw."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import families
from marble_rl import load_config
from marble_rl.balancing.marble import MarbleSettings
from marble_rl.config.run import AdvantagesConfig, EvaluationConfig, OptimizerConfig
from marble_rl.inference.opening import open_target
from marble_rl.losses.nft import Nft, NftSettings
from marble_rl.models.settings import LoraConfig
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.training.batch import training_batch
from marble_rl.types import Conditioning, Group, Prompt, Rollout
from runs import marble, metrics, train
from tools.tiny import BUILDERS

CONFIGS = Path(__file__).parents[2] / "configs"
IMAGES = """[
  {name: clipscore, type: clipscore, params: {model: mini}},
  {name: hpsv2, type: hpsv2, params: {model: mini}},
  {name: small, type: jpeg_compressibility}]"""
VIDEOS = """[
  {name: prompt, type: frames, params: {reward: {type: clipscore, params: {model: mini}}, frames: 2}},
  {name: steady, type: temporal_consistency, params: {model: mini}},
  {name: moves, type: motion, params: {target: 0.01}}]"""


@dataclass(frozen=True)
class Case:
    recipe: str
    family: families.Family
    rewards: str
    """In place of the recipe's: without weights, or with those of the package."""

    @property
    def config(self) -> Path:
        return CONFIGS / f"{self.recipe}.yaml"

    def shrunk_to(self, model: Path, **changes: object) -> list[str]:
        """Words for the command line that shrink the recipe to a tiny pipeline."""
        smaller = {
            "model.path": model,
            "model.text_length": self.family.text_length,
            "model.dtype": "float32",
            "lora.rank": 2,
            "lora.alpha": 6,
            "rewards": self.rewards,
            "rollout.groups": 3,
            "rollout.group_size": 2,
            "rollout.steps": 3,
            "rollout.batch_size": 2,
            **{f"rollout.{key}": value for key, value in self.family.size.items()},
            "loss.timesteps_per_sample": 1,
            "optimizer.lr": 0.05,
            "trainer.micro_batch": 3,
            "evaluation.steps": 2,
            "evaluation.limit": 1,
            **changes,
        }
        return [word for key, value in smaller.items() for word in ("--set", f"{key}={value}")]


CASES = {
    "sd3": Case("sd35-medium", families.SD3, IMAGES),
    "flux": Case("flux-dev", families.FLUX, IMAGES),
    "qwen_image": Case("qwen-image", families.QWEN, IMAGES),
    "wan": Case("wan21-t2v-1.3b", families.WAN, VIDEOS),
    "wan22_5b": Case("wan22-ti2v-5b", families.WAN, VIDEOS),
    "wan22_14b": Case("wan22-t2v-a14b", families.WAN, VIDEOS),
}


@pytest.mark.parametrize(
    "name", [name if name == "sd3" else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_train_evaluate_export_and_plain_diffusers(name: str, tmp_path: Path) -> None:
    case, folder, run = CASES[name], tmp_path / "model", tmp_path / "run"
    BUILDERS[name](folder)
    smaller = case.shrunk_to(folder, **{"balance": "{type: marble, refresh_every: 2}", "trainer.steps": 3})
    train(case.config, run, *smaller)
    lines = metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    rewards = [reward.name for reward in load_config(run / "config.json").rewards]
    assert len(rewards) == 3
    assert all(math.isfinite(line[f"reward/{reward}"]) for line in lines for reward in rewards)
    assert ["qp/norm" in line for line in lines] == [True, False, True]

    evaluated = marble("evaluate", run, "--json")
    assert evaluated.code == 0, evaluated.err
    means = {weights: found["means"] for weights, found in json.loads(evaluated.out)["weights"].items()}
    assert means["base"].keys() == means["ema"].keys() == set(rewards)
    assert means["base"] != means["ema"]

    exported = marble("export", run, "--out", tmp_path / "lora")
    assert exported.code == 0, exported.err
    opened = open_target(str(run))
    assert opened.policy is not None
    x0 = families.assert_plain_diffusers_with_the_lora_samples_as_we_do(
        case.family, folder, opened.model, opened.policy, tmp_path / "lora"
    )
    merged = marble("export", run, "--out", tmp_path / "merged", "--merged")
    assert merged.code == 0, merged.err
    whole = case.family.theirs(case.family.plain(tmp_path / "merged", opened.model), opened.model, "latent")
    torch.testing.assert_close(case.family.pack(x0), whole, atol=1e-4, rtol=0)
    card = (tmp_path / "lora" / "README.md").read_text()
    assert f"pipe = {opened.model.plain_call()[0]}.from_pretrained" in card
    assert all(f"| {reward} | {mean:.4f} |" in card for reward, mean in means["base"].items())


def test_the_paper_s_recipe_has_the_paper_s_settings() -> None:
    """Written out in it, and our defaults."""
    config = load_config(CONFIGS / "sd35-medium.yaml")
    size = {"height": 512, "width": 512, "batch_size": config.rollout.batch_size}
    assert config.rollout == RolloutConfig(**size)
    assert (config.rollout.groups, config.rollout.group_size, config.rollout.steps) == (48, 24, 25)
    assert config.lora == LoraConfig(rank=32, alpha=64)
    assert config.loss == NftSettings(
        beta=0.1, adv_clip=5, kl_weight=1e-4, timestep_fraction=1, timesteps_per_sample=24
    )
    assert (config.model.text_length, config.model.dtype, config.model.vae_dtype) == (128, "float16", "float32")
    assert config.advantages == AdvantagesConfig(std="group")
    assert config.balance == MarbleSettings(refresh_every=10, ema_decay=0.7, uniform_after=900)
    assert config.optimizer == OptimizerConfig(
        lr=3e-4, betas=(0.9, 0.999), weight_decay=1e-4, grad_clip=1, ema_decay=0.9
    )
    assert (config.evaluation.steps, config.evaluation.solver) == (40, "euler")
    assert config.evaluation == EvaluationConfig(batch_size=config.evaluation.batch_size)
    assert config.trained_rewards == ("clipscore", "pickscore", "hpsv2", "ocr", "geneval")
    held_out = [reward.name for reward in config.rewards if reward.held_out]
    assert held_out == ["geneval_strict", "imagereward", "aesthetic"]


@pytest.mark.parametrize("recipe", ["sd35-medium", "sd35-medium-24gb", "flux-dev", "qwen-image"])
def test_near_misses_are_trained_on_and_geneval_s_own_score_is_evaluated(recipe: str) -> None:
    rewards = {reward.name: reward for reward in load_config(CONFIGS / f"{recipe}.yaml").rewards}
    trained, evaluated = rewards["geneval"], rewards["geneval_strict"]
    assert (trained.held_out, evaluated.held_out) == (False, True)
    assert trained.params == {**evaluated.params, "credit": "dense"}


def test_the_paper_s_recipe_leaves_a_random_timestep_out_of_each_image() -> None:
    config = load_config(CONFIGS / "sd35-medium.yaml")
    sigmas = torch.linspace(1, 0, config.rollout.steps + 1)
    groups = tuple(Group(slot, Prompt(slot, "x", "s"), update=0, half=slot) for slot in range(2))
    rollout = Rollout(groups, groups, 24, torch.zeros(48, 1), torch.zeros(48, 1), Conditioning(), sigmas)
    trained = training_batch(rollout, 0, Nft(config.loss), seed=0, step=0).sigmas
    missing = [set(sigmas[:-1].tolist()) - set(levels) for levels in trained.tolist()]
    assert trained.shape == (48, 24)
    assert all(len(left_out) == 1 for left_out in missing)
    assert len(set().union(*missing)) > 12


THEIRS = {
    "model": "path text_length",
    "lora": "rank alpha",
    "rollout": "groups group_size steps solver height width old_policy",
    "advantages": "std",
    "loss": "beta adv_clip kl_weight timestep_fraction timesteps_per_sample",
    "balance": "type refresh_every ema_decay",
    "optimizer": "lr betas weight_decay grad_clip ema_decay",
    "trainer": "",
    "evaluation": "steps solver",
    "logging": "",
}
"""Settings of the paper, or of DiffusionNFT's code where the paper is silent"""


def test_every_line_of_the_paper_s_recipe_is_theirs_or_marked() -> None:
    text = (CONFIGS / "sd35-medium.yaml").read_text()
    sections = dict(re.findall(r"^(\w+):.*\n((?:  .*\n)+)", text, re.MULTILINE))
    for section in ("prompts", "rewards"):
        assert "[ours]" in sections.pop(section)
    lines = {section: re.findall(r"^  (\w+): (.*)", body, re.MULTILINE) for section, body in sections.items()}
    unmarked = {section: [key for key, rest in found if "[ours]" not in rest] for section, found in lines.items()}
    assert unmarked == {section: keys.split() for section, keys in THEIRS.items()}


RECIPES = [*(case.recipe for case in CASES.values()), "sd35-medium-24gb"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_checked_without_the_hub(recipe: str) -> None:
    """conftest.py forbids the hub."""
    outcome = marble("config", "check", CONFIGS / f"{recipe}.yaml")
    assert outcome.code == 0, outcome.err
