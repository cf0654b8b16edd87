"""CLIP rewards on a small model in transformers' format, against what transformers computes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

from marble_rl.config.schema import RewardConfig
from marble_rl.errors import InputError
from marble_rl.mini.render import SIZE
from marble_rl.mini.scorers import TEXT_LENGTH, make_lessons, new_scorer
from marble_rl.mini.tokenizers import clip_tokenizer
from marble_rl.rewards.base import RewardBatch
from marble_rl.rewards.registry import build_rewards
from marble_rl.rewards.scoring import Scorer
from marble_rl.types import Prompt

CPU = torch.device("cpu")
COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    clip = new_scorer(3)
    with torch.no_grad():
        clip.logit_scale.fill_(1.7)
    clip.save_pretrained(folder)
    clip_tokenizer(TEXT_LENGTH).save_pretrained(folder)
    half = [0.5, 0.5, 0.5]
    processor = CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=SIZE, image_mean=half, image_std=half)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batch() -> RewardBatch:
    lessons = make_lessons(COUNT, 0)
    return RewardBatch(lessons.right, [Prompt(i, caption, "s") for i, caption in enumerate(lessons.captions)])


@pytest.fixture(scope="module")
def theirs(folder: Path, batch: RewardBatch) -> Any:
    """What CLIPModel gives for the batch, all pictures with all texts."""
    tokens = AutoTokenizer.from_pretrained(folder)([p.text for p in batch.prompts], padding=True, return_tensors="pt")
    pixels = torch.from_numpy(batch.images).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        return CLIPModel.from_pretrained(folder).eval()(**tokens, pixel_values=pixels)


def loaded(kind: str, **params: Any) -> Any:
    configs = [RewardConfig(type=kind, name="r", params=params)]
    rewards = build_rewards(configs)
    Scorer(configs, rewards).load(CPU)
    return rewards["r"]


@pytest.mark.parametrize("kind", ["clipscore", "hpsv2"])
def test_the_score_is_the_cosine_of_the_embeddings(kind: str, folder: Path, batch: RewardBatch, theirs: Any) -> None:
    cosines = torch.cosine_similarity(theirs.image_embeds, theirs.text_embeds)
    assert cosines.std() > 1e-3
    assert loaded(kind, model=str(folder)).score(batch) == pytest.approx(cosines.tolist(), abs=1e-5)


def test_pickscore_is_the_logit_of_its_own_caption(folder: Path, batch: RewardBatch, theirs: Any) -> None:
    logits = theirs.logits_per_image.diagonal()
    assert loaded("pickscore", model=str(folder)).score(batch) == pytest.approx(logits.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["clipscore", "pickscore", "hpsv2"])
def test_prompts_may_stand_several_times_in_a_batch(kind: str, folder: Path, batch: RewardBatch, theirs: Any) -> None:
    """As in training, where a group of pictures shares its prompt."""
    reward = loaded(kind, model=str(folder))
    order = [2, 0, 2, 1, 0, 2]
    scores = reward.score(RewardBatch(batch.images, [batch.prompts[i] for i in order]))
    logits = theirs.logits_per_image[range(COUNT), order]
    unit = 1.0 if kind == "pickscore" else float(np.exp(1.7))
    assert scores == pytest.approx((logits / unit).tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["clipscore", "pickscore", "hpsv2"])
def test_a_score_does_not_depend_on_the_batch(kind: str, folder: Path, batch: RewardBatch) -> None:
    reward = loaded(kind, model=str(folder))
    alone = [
        reward.score(RewardBatch(image[None], [prompt]))[0]
        for image, prompt in zip(batch.images, batch.prompts, strict=True)
    ]
    assert reward.score(batch) == pytest.approx(alone, abs=1e-5)


def test_long_prompts_are_cut_to_what_the_model_takes(folder: Path, batch: RewardBatch) -> None:
    reward = loaded("clipscore", model=str(folder))
    long, longer = ("a red marble " * times for times in (20, 40))
    scores = [reward.score(RewardBatch(batch.images[:1], [Prompt(0, text, "s")]))[0] for text in (long, longer)]
    assert np.isfinite(scores).all()
    assert scores[0] == scores[1]


def test_larger_pictures_are_reduced(folder: Path, batch: RewardBatch) -> None:
    """Twice the size, each pixel four times: nearly the same to the model."""
    reward = loaded("clipscore", model=str(folder))
    large = RewardBatch(batch.images.repeat(2, axis=1).repeat(2, axis=2), batch.prompts)
    assert reward.score(large) == pytest.approx(reward.score(batch), abs=0.05)


SIZES = {0: (64, 32), 2: (32, 16), 4: (16, 8), 6: (8, 4), 7: (4, 1)}
"""Linear layers of LAION's predictor by their place, between them dropout."""


def laion_head() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Dropout(0.1)] * 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for place, (wide, narrow) in SIZES.items():
            layers[place] = nn.Linear(wide, narrow)
    return nn.Sequential(*layers).eval()


def layout(head: nn.Sequential) -> dict[str, Tensor]:
    """In the wrong order: that of the numbers counts."""
    return {f"layers.{name}": tensor for name, tensor in reversed(head.state_dict().items())}


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_aesthetic_is_laions_network_on_the_picture(
    ending: str, folder: Path, batch: RewardBatch, theirs: Any, tmp_path: Path
) -> None:
    head, file = laion_head(), tmp_path / f"head.{ending}"
    if ending == "pth":
        torch.save(layout(head), file)
    else:
        save_file(layout(head), file)
    with torch.no_grad():
        marks = head(theirs.image_embeds)[:, 0]
    assert marks.std() > 1e-5
    reward = loaded("aesthetic", model=str(folder), head=str(file))
    assert reward.score(batch) == pytest.approx(marks.tolist(), abs=1e-6)
    assert reward.score(RewardBatch(batch.images, batch.prompts[::-1])) == reward.score(batch)


def test_layers_follow_their_numbers(folder: Path, batch: RewardBatch, theirs: Any, tmp_path: Path) -> None:
    """Ten comes after two."""
    first, second = nn.Linear(64, 3), nn.Linear(3, 1)
    tensors = {"layers.10.weight": second.weight, "layers.10.bias": second.bias}
    tensors |= {"layers.2.weight": first.weight, "layers.2.bias": first.bias}
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, tmp_path / "head.safetensors")
    with torch.no_grad():
        marks = second(first(theirs.image_embeds))[:, 0]
    reward = loaded("aesthetic", model=str(folder), head=str(tmp_path / "head.safetensors"))
    assert reward.score(batch) == pytest.approx(marks.tolist(), abs=1e-5)


def test_aesthetic_without_a_head_is_refused_by_name(folder: Path) -> None:
    for params in ({}, {"model": str(folder)}):
        with pytest.raises(InputError, match=r"\(looks\)\.params: head: .*sac\+logos\+ava1-l14-linearMSE\.pth"):
            build_rewards([RewardConfig(type="aesthetic", name="looks", params=params)])


def test_hpsv2_without_a_model_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"\(looks\)\.params: argument 'model' is missing"):
        build_rewards([RewardConfig(type="hpsv2", name="looks")])


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_a_head_is_never_unpickled(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"layers.0.weight": Evil()}, tmp_path / "head.pth")
    with pytest.raises(InputError, match="'r' cannot be loaded"):
        loaded("aesthetic", model=str(folder), head=str(tmp_path / "head.pth"))
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["clipscore", "pickscore", "hpsv2", "aesthetic"])
def test_a_missing_folder_is_bad_input(kind: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    params = {"model": missing, **({"head": str(tmp_path / "head.pth")} if kind == "aesthetic" else {})}
    with pytest.raises(InputError, match=r"'r' cannot be loaded.*nowhere"):
        loaded(kind, **params)


def test_a_missing_head_is_bad_input(folder: Path, tmp_path: Path) -> None:
    for ending in ("pth", "safetensors"):
        with pytest.raises(InputError, match=rf"'r' cannot be loaded.*nowhere\.{ending}"):
            loaded("aesthetic", model=str(folder), head=str(tmp_path / f"nowhere.{ending}"))
