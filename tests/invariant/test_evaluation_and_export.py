"""What comes out of a run: evaluations that can be repeated, and a LoRA that plain diffusers reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from marble_rl import load_config
from marble_rl.distributed import World
from marble_rl.model_card import model_card
from marble_rl.models import load_model
from marble_rl.rollout.rollout import Drawn, draw
from runs import lora_bytes, marble, metrics, train, write_config

PLAIN_DIFFUSERS = """
import sys
import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline

model, lora, out = sys.argv[1:]
torch.set_num_threads(1)
pipe = StableDiffusion3Pipeline.from_pretrained(model)
if lora != "none":
    pipe.load_lora_weights(lora)
common = dict(prompt="a red ball", num_inference_steps=5, guidance_scale=1.0, max_sequence_length=16)
seeded = lambda: torch.Generator().manual_seed(11)
latents = pipe(**common, generator=seeded(), output_type="latent").images
image = pipe(**common, generator=seeded(), output_type="np").images[0]
assert not any(name.startswith("marble") for name in sys.modules)
np.savez(out, latents=latents.detach().numpy(), image=image)
"""


@pytest.fixture(scope="module")
def run(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(write_config(folder / "config.yaml", tiny_sd3), folder / "run")
    return folder / "run"


def plain_diffusers(model: Path, lora: Path | str, out: Path) -> dict[str, np.ndarray]:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_DIFFUSERS, str(model), str(lora), str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


def test_plain_diffusers_reproduces_our_samples(run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    from marble_rl.inference import open_target
    from marble_rl.models.base import PromptCache
    from marble_rl.rollout.rollout import sample

    exported = tmp_path / "exported"
    assert marble("export", run, "--out", exported).code == 0
    plain = plain_diffusers(tiny_sd3, exported, tmp_path / "plain.npz")

    opened = open_target(str(run))
    shape = opened.model.latent_shape(None, None)
    noise = torch.randn((1, *shape), generator=torch.Generator().manual_seed(11))
    with opened.acting_as("ema"):
        conditioning = PromptCache(opened.model).encode(["a red ball"])
        latents, _ = sample(opened.model, noise, conditioning, opened.model.sigmas(5, shape), "euler")
    np.testing.assert_allclose(plain["latents"], latents.numpy(), atol=1e-4)

    arguments = ["--prompt", "a red ball", "--seed", 11, "--steps", 5]
    assert marble("sample", run, *arguments, "--out", tmp_path / "ours").code == 0
    ours = np.asarray(Image.open(tmp_path / "ours" / "seed-11.png"), dtype=float) / 255
    # A PNG holds 256 levels: equal up to one of them.
    np.testing.assert_allclose(plain["image"], ours, atol=1 / 255 + 1e-6)

    base = plain_diffusers(tiny_sd3, "none", tmp_path / "base.npz")
    assert np.abs(base["latents"] - plain["latents"]).max() > 1e-2


def test_the_runs_own_lora_folder_is_the_exported_one(run: Path, tmp_path: Path) -> None:
    assert marble("export", run, "--out", tmp_path / "exported").code == 0
    assert (tmp_path / "exported" / "pytorch_lora_weights.safetensors").read_bytes() == lora_bytes(run)
    assert marble("export", run, "--out", tmp_path / "raw", "--weights", "default").code == 0
    assert (tmp_path / "raw" / "pytorch_lora_weights.safetensors").read_bytes() != lora_bytes(run)


def test_sample_from_an_exported_lora(run: Path, tmp_path: Path) -> None:
    assert marble("export", run, "--out", tmp_path / "lora").code == 0
    arguments = ["--prompt", "a kite", "--images", 2, "--steps", 3]
    file = tmp_path / "lora" / "pytorch_lora_weights.safetensors"
    for name, target in {"run": run, "lora": tmp_path / "lora", "file": file}.items():
        outcome = marble("sample", target, *arguments, "--out", tmp_path / "samples" / name)
        assert outcome.code == 0, outcome.err
    for seed in (0, 1):
        pictures = [tmp_path / "samples" / name / f"seed-{seed}.png" for name in ("run", "lora", "file")]
        first, *others = (np.asarray(Image.open(picture), dtype=int) for picture in pictures)
        assert all(np.abs(first - other).max() <= 1 for other in others)


@pytest.fixture(scope="module")
def evaluated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run with an evaluation in its folder."""
    copy = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(run, copy)
    assert marble("evaluate", copy).code == 0
    return copy


def test_merged_weights_give_the_same_samples_in_plain_diffusers(evaluated: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    assert marble("export", evaluated, "--out", tmp_path / "lora").code == 0
    merged = marble("export", evaluated, "--out", tmp_path / "merged", "--merged")
    assert merged.code == 0, merged.err
    assert f"StableDiffusion3Pipeline.from_pretrained('{tmp_path / 'merged'}')" in merged.out
    with_lora = StableDiffusion3Pipeline.from_pretrained(load_config(evaluated / "config.json").model.path)
    bare = plain_latents(with_lora)
    with_lora.load_lora_weights(tmp_path / "lora")
    whole = plain_latents(StableDiffusion3Pipeline.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(whole, plain_latents(with_lora), atol=1e-4, rtol=0)
    assert (whole - bare).abs().max() > 1e-2
    code = (tmp_path / "merged" / "README.md").read_text().split("```")[1].removeprefix("python")
    names: dict[str, Any] = {}
    exec(compile(code.replace("THIS_FOLDER", str(tmp_path / "merged")), "README.md", "exec"), names)
    assert names["image"].size == (16, 16)
    half = marble("export", evaluated, "--out", tmp_path / "half", "--merged", "--dtype", "bfloat16")
    assert half.code == 0, half.err
    half_size, size = (
        sum(f.stat().st_size for f in (tmp_path / n).rglob("*model*.safetensors")) for n in ("half", "merged")
    )
    assert 0.4 < half_size / size < 0.7


def plain_latents(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 4, "guidance_scale": 1.0, "max_sequence_length": 16, "output_type": "latent"}
    return pipeline("a red ball", generator=torch.Generator().manual_seed(11), **call).images.detach()


def test_the_model_card_says_what_the_run_recorded(evaluated: Path, tmp_path: Path) -> None:
    exported = marble("export", evaluated, "--out", tmp_path / "lora")
    assert exported.code == 0, exported.err
    assert exported.err == ""
    card = (tmp_path / "lora" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["base_model"] == "tiny-sd3"
    assert facts["library_name"] == "diffusers"
    assert {"lora", "text-to-image"} <= set(facts["tags"])
    assert "license" not in facts  # the user's choice
    assert "# license:" in front
    for words in (
        "(`balance: marble`, 8 steps, ema weights)",
        "- bright (`brightness`)",
        "- things: 4 prompts of the config",
    ):
        assert words in body
    means = {name: found["means"] for name, found in scores_file(evaluated)["weights"].items()}
    for name, before in means["base"].items():
        assert f"| {name} | {before:.4f} | {means['ema'][name]:.4f} |" in body
    assert "](grid.png)" in body
    assert (tmp_path / "lora" / "grid.png").read_bytes() == (evaluated / "evaluation" / "grid.png").read_bytes()
    again = load_config(tmp_path / "lora" / "training_config.yaml")
    assert again == load_config(evaluated / "config.json")


def test_the_card_names_models_as_plain_diffusers_and_the_hub_know_them() -> None:
    """The embedded one by its folder, one of the hub by its id."""
    model = load_model("mini", torch.device("cpu"))
    config = load_config(Path(__file__).parents[2] / "configs" / "mini-demo.yaml")
    card = model_card(model, config, 3, "ema")
    folder = card.split('from_pretrained("')[1].split('"')[0]
    assert (Path(folder) / "model_index.json").is_file()
    on_hub = config.model_copy(update={"model": config.model.model_copy(update={"path": "owner/name"})})
    card = model_card(model, on_hub, 3, "ema")
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "owner/name"
    assert 'from_pretrained("owner/name")' in card
    assert "# base_model" not in card


def scores_file(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluation" / "scores.json").read_text())


def test_an_evaluation_of_other_weights_is_not_in_the_card(evaluated: Path, tmp_path: Path) -> None:
    old = marble("export", evaluated, "--out", tmp_path / "old", "--weights", "old")
    assert "no scores of the weights old" in old.err
    earlier = marble("export", evaluated, "--out", tmp_path / "earlier", "--step", 6)
    assert "is of step 8, not 6" in earlier.err
    for name in ("old", "earlier"):
        assert "| bright |" not in (tmp_path / name / "README.md").read_text()
        assert not (tmp_path / name / "grid.png").exists()


def test_a_run_without_or_with_a_broken_evaluation(run: Path, tmp_path: Path) -> None:
    assert "no evaluation in" in marble("export", run, "--out", tmp_path / "lora").err
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "evaluation").mkdir()
    (tmp_path / "run" / "evaluation" / "scores.json").write_text("{}")
    broken = marble("export", tmp_path / "run", "--out", tmp_path / "broken")
    assert broken.code == 2
    assert "is not an evaluation" in broken.err


def test_export_refuses_to_overwrite(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    outcome = marble("export", run, "--out", tmp_path / "full")
    assert outcome.code == 2
    assert "not empty" in outcome.err


def scores(*arguments: object) -> dict[str, dict[tuple[str, int], dict[str, float | None]]]:
    """Scores by weights and (prompt, image number)."""
    outcome = marble("evaluate", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)["weights"]
    return {
        name: {(image["prompt"], image["image"]): image["scores"] for image in result["images"]}
        for name, result in report.items()
    }


def test_evaluation_is_seeded_image_by_image(run: Path, tmp_path: Path) -> None:
    """More images, fewer prompts or another batch size leave the images that stay as they were."""
    full = scores(run, "--out", tmp_path / "e", "--images", 3)
    assert full == scores(run, "--out", tmp_path / "e", "--images", 3)
    assert full["base"] != full["ema"]
    fewer = scores(run, "--out", tmp_path / "e", "--set", "evaluation.limit=2", "--set", "evaluation.batch_size=3")
    assert len(fewer["ema"]) == 4
    for key, values in fewer["ema"].items():
        for name, value in values.items():
            assert value == pytest.approx(full["ema"][key][name], abs=2e-3), (key, name)
    other = scores(run, "--out", tmp_path / "e", "--images", 3, "--seed", 5)
    assert other["ema"] != full["ema"]


def test_rewards_that_do_not_apply_have_no_score(run: Path, tmp_path: Path) -> None:
    for (prompt, _), values in scores(run, "--out", tmp_path / "e")["ema"].items():
        assert (values["colour"] is None) == (not any(c in prompt for c in ("red", "blue", "green")))
        assert values["bright"] is not None


def test_evaluation_does_not_touch_training(config_file: Path, run: Path, tmp_path: Path) -> None:
    train(config_file, tmp_path / "run", "--set", "trainer.eval_every=3")
    assert lora_bytes(tmp_path / "run") == lora_bytes(run)
    evaluated = [line["step"] for line in metrics(tmp_path / "run") if "eval/bright" in line]
    assert evaluated == [2, 5]


def test_evaluation_during_training_keeps_no_pictures(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven prompts, one a batch: when all are scored, only the last batch is still there."""
    pictures: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def watched(*arguments: Any) -> Drawn:
        drawn = draw(*arguments)
        memory = drawn.images.numpy().copy()
        pictures.append(weakref.ref(memory))
        return replace(drawn, images=torch.from_numpy(memory))

    def gather(self: World, value: Any) -> list[Any]:
        alive.append(sum(memory() is not None for memory in pictures))
        return [value]

    monkeypatch.setattr("marble_rl.evaluate.draw", watched)
    monkeypatch.setattr(World, "gather", gather)
    one = ("--set", "trainer.steps=1", "--set", "trainer.eval_every=1", "--set", "evaluation.batch_size=1")
    train(config_file, tmp_path / "run", *one)
    assert len(pictures) == 7
    assert max(alive) == 1


def test_held_out_rewards_are_scored_but_not_trained(tiny_sd3: Path, tmp_path: Path) -> None:
    rewards = [{"name": "bright", "type": "brightness"}, {"name": "small", "type": "jpeg_compressibility"}]
    without = write_config(tmp_path / "a.yaml", tiny_sd3, rewards=rewards[:1])
    with_ = write_config(tmp_path / "b.yaml", tiny_sd3, rewards=[rewards[0], {**rewards[1], "held_out": True}])
    train(without, tmp_path / "a")
    train(with_, tmp_path / "b")
    assert lora_bytes(tmp_path / "a") == lora_bytes(tmp_path / "b")
    assert "small" in next(iter(scores(tmp_path / "b", "--out", tmp_path / "e")["ema"].values()))


def test_an_optional_reward_that_cannot_be_loaded_is_left_out_with_a_remark(tiny_sd3: Path, tmp_path: Path) -> None:
    bright = {"name": "bright", "type": "brightness"}
    missing = {"name": "missing", "type": "rewards_for_tests:NoWeights", "held_out": True}
    config = write_config(tmp_path / "a.yaml", tiny_sd3, rewards=[bright, {**missing, "optional": True}])
    trained = train(config, tmp_path / "run", "--set", "trainer.steps=1", "--set", "trainer.eval_every=1")
    assert "left out: optional reward 'missing'" in trained.out + trained.err
    assert "eval/bright" in metrics(tmp_path / "run")[0]
    found = marble("evaluate", tmp_path / "run", "--json")
    assert found.code == 0
    assert "left out: optional reward 'missing'" in found.err
    assert list(json.loads(found.out)["weights"]["ema"]["means"]) == ["bright"]
    strict = write_config(tmp_path / "b.yaml", tiny_sd3, rewards=[bright, missing])
    refused = marble("train", strict, "--out", tmp_path / "strict")
    assert refused.code == 2
    assert "'missing' cannot be loaded" in refused.err


def test_evaluate_a_plain_pipeline_and_a_prompt_file(config_file: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("\ufeffa red ball\n\na drum\n")
    found = scores(tiny_sd3, "--config", config_file, "--prompts", tmp_path / "mine.txt", "--out", tmp_path / "e")
    assert list(found) == ["given"]
    assert [prompt for prompt, _ in found["given"]] == ["a red ball", "a drum"]
    assert (tmp_path / "e" / "grid.png").stat().st_size > 0


def test_a_prompt_file_that_names_an_unknown_reward(config_file: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a red ball", "rewards": ["brigth"]}\n')
    outcome = marble("evaluate", tiny_sd3, "--config", config_file, "--prompts", tmp_path / "mine.jsonl")
    assert outcome.code == 2
    assert "Did you mean 'bright'?" in outcome.err
