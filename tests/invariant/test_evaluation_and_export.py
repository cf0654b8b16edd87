"""What comes out of a run: evaluations that can be repeated, and a LoRA that plain diffusers reads."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
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
from peft import LoraConfig
from PIL import Image
from safetensors import SafetensorError, safe_open

from marble_rl import load_config
from marble_rl.config.run import EvaluationConfig
from marble_rl.distributed.world import World
from marble_rl.errors import NonFinite
from marble_rl.evaluation.evaluate import evaluate
from marble_rl.inference import opening as inference
from marble_rl.inference.export import export_lora
from marble_rl.inference.model_card import model_card
from marble_rl.models import load_model
from marble_rl.models.base import PromptCache
from marble_rl.models.sd3 import SD3Model
from marble_rl.prompts import load_prompts
from marble_rl.prompts.settings import PromptSourceConfig
from marble_rl.rewards.builtin.brightness import Brightness
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.rollout.rollout import Sampled, try_sample
from marble_rl.rollout.settings import RolloutConfig
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.media import decoded
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
def run(finished_run: Path) -> Path:
    return finished_run


def plain_diffusers(model: Path, lora: Path | str, out: Path) -> dict[str, np.ndarray]:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_DIFFUSERS, str(model), str(lora), str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


@pytest.mark.full
def test_plain_diffusers_reproduces_our_samples(run: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    from marble_rl.inference.opening import open_target
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


def test_a_lora_says_no_more_of_itself_than_any_peft_understands(run: Path) -> None:
    with safe_open(run / "lora" / "pytorch_lora_weights.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.r"] == 2
    assert metadata["transformer.lora_alpha"] == 2  # 8 in training: the scale is in B, for who reads no metadata
    assert metadata.keys() == {"transformer.r", "transformer.lora_alpha", "transformer.target_modules"}


def test_the_runs_own_lora_folder_is_the_exported_one(run: Path, tmp_path: Path) -> None:
    assert marble("export", run, "--out", tmp_path / "exported").code == 0
    assert (tmp_path / "exported" / "pytorch_lora_weights.safetensors").read_bytes() == lora_bytes(run)
    assert marble("export", run, "--out", tmp_path / "raw", "--weights", "default").code == 0
    assert (tmp_path / "raw" / "pytorch_lora_weights.safetensors").read_bytes() != lora_bytes(run)


def test_a_lora_for_another_program(run: Path, tmp_path: Path) -> None:
    """Its weights are tested in models/test_lora_formats.py."""
    cards = {}
    for layout in ("comfyui", "kohya"):
        exported = marble("export", run, "--out", tmp_path / layout, "--format", layout)
        assert exported.code == 0, exported.err
        assert f"{tmp_path / layout / 'README.md'} says how to use it" in exported.out
        cards[layout] = (tmp_path / layout / "README.md").read_text()
        front = yaml.safe_load(cards[layout].split("---\n")[1])
        assert "library_name" not in front
        assert layout in front["tags"]
    assert "into ComfyUI's `models/loras`" in cards["comfyui"]
    assert "Names as in kohya's scripts" in cards["kohya"]
    sampled = marble("sample", tmp_path / "kohya", "--prompt", "x", "--out", tmp_path / "out")
    assert sampled.code == 2  # diffusers does not read kohya's names for this family
    assert "target: diffusers finds no layer of Stable Diffusion 3 in" in sampled.err
    assert "export it with --format diffusers" in sampled.err
    merged = marble("export", run, "--out", tmp_path / "merged", "--merged", "--format", "kohya")
    assert merged.code == 2
    assert "--format: 'kohya' given with --merged" in merged.err
    assert not (tmp_path / "merged").exists()


def test_a_lora_is_exported_without_the_weights_of_its_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file as with them, byte for byte."""
    opened = inference.open_target(str(run), device="cpu", plain=True)
    export_lora(opened, "old", tmp_path / "loaded", RunFolder(run))
    monkeypatch.setattr(inference, "load_model", no_model)
    assert marble("export", run, "--out", tmp_path / "lora", "--weights", "old").code == 0
    loaded, exported = ({file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in ("loaded", "lora"))
    assert len(exported) == 4
    assert exported == loaded


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
def lora(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's, exported."""
    folder = tmp_path_factory.mktemp("exported") / "lora"
    assert marble("export", run, "--out", folder).code == 0
    return folder


def test_a_lora_can_be_left_off(run: Path, lora: Path, tmp_path: Path) -> None:
    """Which gives the samples of the run's base."""
    pictures = {}
    off = ("--weights", "base")
    for name, arguments in {"run": (run, *off), "lora": (lora, *off), "on": (lora,)}.items():
        outcome = marble("sample", *arguments, "--prompt", "a kite", "--steps", 3, "--out", tmp_path / name)
        assert outcome.code == 0, outcome.err
        pictures[name] = np.asarray(Image.open(tmp_path / name / "seed-0.png"), dtype=int)
    assert np.array_equal(pictures["run"], pictures["lora"])
    assert np.abs(pictures["lora"] - pictures["on"]).max() > 1


def test_a_lora_against_its_base(run: Path, lora: Path, config_file: Path, tmp_path: Path) -> None:
    both = ("--config", config_file, "--weights", "base", "--weights", "given", "--set", "evaluation.limit=1")
    found = scores(lora, *both, "--out", tmp_path / "lora")
    known = scores(run, "--set", "evaluation.limit=1", "--out", tmp_path / "run")
    assert list(found) == ["base", "given"]
    assert found["base"] == known["base"]
    assert found["given"] != found["base"]


def test_a_damaged_newest_checkpoint_is_named_before_the_one_before_is_used(config_file: Path, tmp_path: Path) -> None:
    train(config_file, tmp_path / "run", "--set", "trainer.steps=2", "--set", "trainer.save_every=1")
    (tmp_path / "run" / "checkpoints" / "step-2" / "state.json").write_text("{}")
    outcome = marble("export", tmp_path / "run", "--out", tmp_path / "lora")
    assert outcome.code == 0
    assert "skipped checkpoint" in outcome.err
    assert "step-2" in outcome.err


@pytest.mark.parametrize("card", ["[1]", '{"base_model": 7}', '{"base_model": "mini", "text_length": "much"}', "{"])
def test_a_damaged_card_is_bad_input(lora: Path, tmp_path: Path, card: str) -> None:
    shutil.copytree(lora, tmp_path / "lora")
    (tmp_path / "lora" / "marble.json").write_text(card)
    outcome = marble("sample", tmp_path / "lora", "--prompt", "x", "--out", tmp_path / "out")
    assert outcome.code == 2, outcome.err
    assert "marble.json" in outcome.err
    assert "fix the file or delete it" in outcome.err


def test_a_device_that_is_not_there_is_named_by_its_option(run: Path, tmp_path: Path) -> None:
    for command in (("sample", run, "--prompt", "x"), ("evaluate", run)):
        outcome = marble(*command, "--device", "mps", "--out", tmp_path / "out")
        assert outcome.code == 2
        assert "--device: 'mps' given, but torch finds the CPU only" in outcome.err


def test_weights_that_will_not_do_are_refused_before_the_first_are_evaluated(
    lora: Path, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LoRA of text encoders cannot be switched off after prompts were encoded with it."""
    evaluated: list[str] = []
    plain = SD3Model.read_lora

    def with_text_encoder(self: SD3Model, file: Path) -> None:
        plain(self, file)
        self.text_encoders[0].add_adapter(LoraConfig(target_modules=["q_proj"]))

    monkeypatch.setattr(SD3Model, "read_lora", with_text_encoder)
    monkeypatch.setattr("marble_rl.evaluation.report.evaluate", lambda *_, **__: evaluated.append("evaluated"))
    both = ("--weights", "given", "--weights", "base")
    outcome = marble("evaluate", lora, "--config", config_file, *both, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "'base' is not possible for a LoRA of text encoders" in outcome.err
    assert evaluated == []


def test_options_that_do_not_apply_are_refused(run: Path, lora: Path, tiny_sd3: Path, config_file: Path) -> None:
    sample, evaluate = ("sample", "--prompt", "x"), ("evaluate", "--config", config_file)
    for (command, *given), target, option, value, says in [
        (sample, lora, "--weights", "ema", "a LoRA; use one of given, base"),
        (sample, lora, "--checkpoint", 3, "a LoRA, which has no checkpoints; leave it out"),
        (sample, tiny_sd3, "--checkpoint", 3, "a pipeline, which has no checkpoints; leave it out"),
        (sample, tiny_sd3, "--weights", "base", "a pipeline; leave it out"),
        (sample, tiny_sd3, "--model", "mini", "a pipeline, which names its model; leave it out"),
        (sample, run, "--model", "mini", "a run, which names its model; leave it out"),
        (sample, run, "--weights", "given", "a run; use one of ema, default, old, base"),
        (evaluate, tiny_sd3, "--weights", "base", "a pipeline; leave it out"),
        (evaluate, lora, "--checkpoint", 3, "a LoRA, which has no checkpoints; leave it out"),
        (evaluate, run, "--model", "mini", "a run, which names its model; leave it out"),
        (evaluate, run, "--set", "model.path=mini", "a run, is evaluated with its own model.path"),
        (evaluate, run, "--set", "model.text_length=8", "a run, is evaluated with its own model.text_length"),
        (evaluate, run, "--set", "model.device=cpu", "give --device"),
        (evaluate, run, "--set", "model={path: mini}", "a run, is evaluated with its own model"),
        (evaluate, lora, "--set", "model.guidance=2", "a LoRA, is evaluated with its own model.guidance"),
        (evaluate, tiny_sd3, "--set", "model.path=mini", "a pipeline, is evaluated with its own model.path"),
    ]:
        outcome = marble(command, target, *given, option, value, "--out", config_file.parent / "out")
        assert outcome.code == 2
        for words in (option, str(value), says):
            assert words in outcome.err
        assert not (config_file.parent / "out").exists()


@pytest.mark.full
def test_settings_of_the_model_are_heeded(
    run: Path, lora: Path, tiny_sd3: Path, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run those that save memory, by a LoRA and a pipeline also the config's others."""
    loaded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(inference, "load_model", lambda *how: (loaded.append(how), load_model(*how))[1])
    few = ("--set", "evaluation.limit=1", "--set", "model.decoding=tiled", "--out", tmp_path)
    for target in (run, lora, tiny_sd3):
        scores(target, "--config", config_file, *few)
    scores(run, "--weights", "ema", *few)
    for path, _, text_length, _, memory in loaded:
        assert (path, text_length, memory.decoding) == (str(tiny_sd3), 16, "tiled")
    assert len(loaded) == 4


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
    assert 'from_pretrained("owner/name", dtype=torch.bfloat16)\npipe.to(device)' in card
    in_half = on_hub.model_copy(update={"model": on_hub.model.model_copy(update={"dtype": "float16"})})
    assert 'from_pretrained("owner/name", dtype=torch.bfloat16)' in model_card(model, in_half, 3, "ema")
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
    assert "is not an evaluation that this version reads" in broken.err


def test_export_refuses_to_overwrite(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    outcome = marble("export", run, "--out", tmp_path / "full")
    assert outcome.code == 2
    assert "not empty" in outcome.err


def no_model(*arguments: Any) -> None:
    raise AssertionError("the model was loaded")


def test_a_folder_that_cannot_be_written_is_told_of_first(
    run: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "load_model", no_model)
    for command, *arguments in (("sample", "--prompt", "x"), ("evaluate",), ("export",), ("export", "--merged")):
        outcome = marble(command, run, *arguments, "--out", config_file / "out")
        assert outcome.code == 2
        assert f"--out: cannot write to {config_file / 'out'}" in outcome.err


def test_other_bad_input_leaves_no_folder(run: Path, tiny_sd3: Path, config_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    for command, *arguments in (
        ("evaluate", run, "--prompts", tmp_path / "nowhere.txt"),
        ("evaluate", tmp_path / "nowhere", "--config", config_file),
        ("evaluate", run, "--step", 5),
        ("sample", tmp_path / "nowhere", "--prompt", "x"),
        ("export", run, "--step", 5),
    ):
        assert marble(command, *arguments, "--out", out).code == 2
        assert not (tmp_path / "new").exists()
    out.mkdir(parents=True)
    assert marble("export", run, "--step", 5, "--out", out).code == 2
    assert out.exists()  # it was there before


def test_a_failed_export_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import StableDiffusion3Pipeline

    def save(self: Any, folder: Path) -> None:
        (folder / "transformer").mkdir()
        (folder / "model_index.json").touch()
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")

    monkeypatch.setattr(StableDiffusion3Pipeline, "save_pretrained", save)
    outcome = marble("export", run, "--out", tmp_path / "merged", "--merged")
    assert outcome.code == 3
    assert f"cannot write {tmp_path / 'merged'}: Error while serializing" in outcome.err
    assert "Free some space and export again" in outcome.err
    assert not (tmp_path / "merged").exists()


def test_samples_are_saved_one_by_one(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none takes the place of an earlier one."""
    given = ("sample", run, "--steps", 2, "--out", tmp_path)
    assert marble(*given, "--prompt", "a kite").code == 0
    kite = (tmp_path / "seed-0.png").read_bytes()
    samples = iter([inference.sample])

    def failing(*arguments: Any) -> Any:
        for sample in samples:
            return sample(*arguments)
        raise NonFinite("no more")

    monkeypatch.setattr(inference, "sample", failing)
    outcome = marble(*given, "--prompt", "a drum", "--images", 2)
    assert outcome.code == 3
    assert outcome.out.split() == [str(tmp_path / "seed-0-2.png")]
    assert (tmp_path / "seed-0.png").read_bytes() == kite != (tmp_path / "seed-0-2.png").read_bytes()


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

    def watched(*arguments: Any) -> Sampled:
        drawn = try_sample(*arguments)
        memory = drawn.images.numpy().copy()
        pictures.append(weakref.ref(memory))
        return replace(drawn, images=torch.from_numpy(memory))

    def gather(self: World, value: Any) -> list[Any]:
        alive.append(sum(memory() is not None for memory in pictures))
        return [value]

    monkeypatch.setattr("marble_rl.evaluation.evaluate.try_sample", watched)
    monkeypatch.setattr(World, "gather", gather)
    one = ("--set", "trainer.steps=1", "--set", "trainer.eval_every=1", "--set", "evaluation.batch_size=1")
    train(config_file, tmp_path / "run", *one)
    assert len(pictures) == 7
    assert max(alive) == 1


def test_only_the_pictures_asked_for_are_kept(tiny_sd3: Path) -> None:
    """Those of rows, whatever batches they were drawn in."""
    model = load_model(str(tiny_sd3), torch.device("cpu"), 16)
    scorer = Scorer([RewardConfig(type="brightness", name="bright")], {"bright": Brightness()})
    scorer.load(torch.device("cpu"))
    prompts = load_prompts([PromptSourceConfig(name="a", texts=["a cup", "a hat", "a kite"])], "prompts")

    def pictures(batch_size: int, **asked: Any) -> dict[int, torch.Tensor]:
        settings = EvaluationConfig(steps=2, batch_size=batch_size, images_per_prompt=2)
        found = evaluate(model, PromptCache(model), scorer, prompts, settings, RolloutConfig(), **asked).pictures
        return {row: decoded(kept.data) for row, kept in found.items()}

    every = pictures(6, pictures=range(6))
    assert sorted(every) == list(range(6))
    some = pictures(4, pictures=[0, 5])
    assert sorted(some) == [0, 5]
    distance = {(a, b): (some[a].float() - every[b].float()).abs().mean() for a in some for b in every}
    for row in some:
        assert min(every, key=lambda other: distance[row, other]) == row
        assert distance[row, row] <= 2  # what WebP loses
    assert pictures(4) == {}


def test_an_evaluation_takes_the_place_of_its_own_pictures_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only when its scores are written: until then the files are those of the scores that are there."""

    def listed() -> set[str]:
        entries = json.loads((tmp_path / "scores.json").read_text())["pictures"]
        return {file for entry in entries for file in entry["files"].values()}

    def kept() -> set[str]:
        return {str(file.relative_to(tmp_path)) for file in (tmp_path / "images").iterdir()}

    given = ("evaluate", run, "--out", tmp_path, "--set", "evaluation.limit=1")
    assert marble(*given, "--weights", "base", "--weights", "ema").code == 0
    first = listed()
    assert kept() == first
    (tmp_path / "images" / "mine.webp").touch()
    with monkeypatch.context() as broken:
        broken.setattr("marble_rl.storage.write_json", lambda *_: os.stat(tmp_path / "nowhere"))
        outcome = marble(*given, "--weights", "old")
    assert outcome.code == 3
    assert "Fix that and evaluate again" in outcome.err
    assert kept() >= first == listed()
    assert marble(*given, "--weights", "old").code == 0
    assert kept() == {*listed(), "images/mine.webp"}
    assert not listed() & first


def test_without_a_terminal_an_evaluation_says_how_far_it_is(run: Path, tmp_path: Path) -> None:
    outcome = marble("evaluate", run, "--weights", "old", "--out", tmp_path, "--set", "evaluation.batch_size=4")
    told = [line for line in outcome.err.splitlines() if line.startswith("evaluating old: ")]
    assert told == ["evaluating old: 50 % of 7 images", "evaluating old: 100 % of 7 images"]


@pytest.mark.full
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


@pytest.mark.parametrize(
    "name",
    [
        'a"); import os; os.abort() #',
        "a`b` <img src=x onerror=alert(1)> | [x](y) *z*",
        "a\n---\nlicense: mit\n```\n# b",
    ],
)
def test_the_name_of_a_model_folder_is_only_text_in_the_card(name: str, tiny_sd3: Path) -> None:
    config = load_config(Path(__file__).parents[2] / "configs" / "mini-demo.yaml")
    path = f"/models/{name}"
    named = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    card = model_card(load_model(str(tiny_sd3), torch.device("cpu")), named, 3, "ema")
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["base_model"] == Path(path).name
    assert "license" not in yaml.safe_load(front)
    text, code, rest = re.split(r"^```(?:python)?$", body, flags=re.MULTILINE)
    assert "<img" not in text + rest
    assert "[x](y)" not in text + rest
    assert [line for line in (text + rest).splitlines() if line.startswith("# ")] == [
        line for line in text.splitlines() if "fine-tuned on" in line
    ]
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert [ast.literal_eval(call.args[0]) for call in calls if "from_pretrained" in ast.dump(call.func)] == [path]
