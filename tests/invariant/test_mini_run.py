"""The demo in short: the embedded pipeline with its real rewards, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from runs import lora_bytes, marble, metrics, train

CONFIG = Path(__file__).parents[2] / "configs" / "mini-demo.yaml"
SHORT = [
    *("--set", "trainer.steps=3", "--set", "trainer.save_every=2", "--set", "balance.refresh_every=2"),
    *("--set", "rollout.groups=6", "--set", "rollout.group_size=4", "--set", "rollout.steps=3"),
]
TRAINED = ["clipscore", "pickscore", "hpsv2", "ocr", "geneval"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini") / "run"
    outcome = train(CONFIG, folder, *SHORT)
    assert "too few refreshes to say (2, where 5 are needed)" in outcome.out
    assert "on cpu: trains" in outcome.err
    return folder


@pytest.mark.full
def test_every_reward_is_trained_on_its_own_prompts(run: Path) -> None:
    first = metrics(run)[0]
    assert {f"reward/{name}" for name in TRAINED} <= first.keys()
    assert not any("aesthetic" in key or "tesseract" in key for key in first)
    assert all(f"alpha_bar/{name}" in first for name in TRAINED)


@pytest.mark.full
def test_resumed_is_uninterrupted(run: Path, tmp_path: Path) -> None:
    train(CONFIG, tmp_path / "run", *SHORT, "--set", "trainer.steps=2")
    train(CONFIG, tmp_path / "run", *SHORT, "--resume")
    assert lora_bytes(tmp_path / "run") == lora_bytes(run)
    assert metrics(tmp_path / "run") == metrics(run)


@pytest.mark.full
def test_evaluation_compares_base_and_tuned_with_intervals(run: Path) -> None:
    options = ["--set", "evaluation.limit=3", "--set", "evaluation.steps=3", "--set", "evaluation.batch_size=9"]
    outcome = marble("evaluate", run, *options, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert list(found["differences"]) == [*TRAINED, "aesthetic", "tesseract"]
    assert all(d["low"] <= d["mean"] <= d["high"] for d in found["differences"].values())
    scores = {row["source"]: row["scores"] for row in found["weights"]["base"]["images"]}
    assert scores["text"]["ocr"] is not None
    assert scores["text"]["geneval"] is None
    assert scores["composition"]["geneval"] is not None
    assert scores["general"]["ocr"] is scores["general"]["geneval"] is None
    with Image.open(run / "evaluation" / "grid.png") as grid:
        assert grid.width > 3 * 2 * 128  # a column per source, two pictures each


@pytest.mark.full
def test_plain_diffusers_draws_with_the_tuned_lora(run: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    from marble_rl.mini import WEIGHTS

    pipeline = StableDiffusion3Pipeline.from_pretrained(WEIGHTS / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(run / "lora"))
    image = pipeline("a red star", max_sequence_length=14, guidance_scale=1.0, num_inference_steps=2).images[0]
    assert image.size == (64, 64)
