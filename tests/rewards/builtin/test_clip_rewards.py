"""CLIP rewards on a small model in transformers' format, against what transformers computes itself."""

from __future__ import annotations

import shutil
import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

from marble_rl.errors import InputError
from marble_rl.mini.shapes import SIZE
from marble_rl.rewards.builtin.clip import COSINE
from marble_rl.rewards.builtin.embedder import unit_vectors
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from reward_device import DEVICE
from tools.mini.scorers import TEXT_LENGTH, make_lessons, new_scorer
from tools.mini.tokenizers import clip_tokenizer

COUNT = 8


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
    Scorer(configs, rewards).load(DEVICE)
    return rewards["r"]


@pytest.mark.parametrize("kind", ["clipscore", "hpsv2"])
def test_the_score_is_the_cosine_of_the_embeddings(kind: str, folder: Path, batch: RewardBatch, theirs: Any) -> None:
    cosines = torch.cosine_similarity(theirs.image_embeds, theirs.text_embeds)
    assert cosines.std() > 1e-3
    assert loaded(kind, model=str(folder)).score(batch) == pytest.approx(cosines.tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def features(folder: Path, batch: RewardBatch) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Embeddings of pictures and texts, [B, D] each, as they come out of the projections."""
    tokens = AutoTokenizer.from_pretrained(folder)([p.text for p in batch.prompts], padding=True, return_tensors="pt")
    pixels = torch.from_numpy(batch.images).permute(0, 3, 1, 2) / 127.5 - 1
    clip = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        images = clip.visual_projection(clip.vision_model(pixels).pooler_output)
        texts = clip.text_projection(clip.text_model(**tokens).pooler_output)
    return images.double().numpy(), texts.double().numpy()


def lengths(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.sqrt((vectors**2).sum(-1))


def test_units_by_hand(folder: Path, batch: RewardBatch, features: Any) -> None:
    """The cosine for clipscore and hpsv2; for pickscore e^1.7 times that, over 26 where that is asked for."""
    images, texts = features
    assert abs(lengths(images) - 1).min() > 1e-3
    cosines = (images * texts).sum(-1) / lengths(images) / lengths(texts)
    native = cosines * 2.718281828459045**1.7
    for kind in ("clipscore", "hpsv2"):
        assert loaded(kind, model=str(folder)).score(batch) == pytest.approx(cosines.tolist(), abs=1e-5)
    assert loaded("pickscore", model=str(folder)).score(batch) == pytest.approx(native.tolist(), abs=1e-5)
    divided = loaded("pickscore", model=str(folder), divide_by=26).score(batch)
    assert divided == pytest.approx((native / 26).tolist(), abs=1e-6)


def test_aesthetic_by_hand(folder: Path, batch: RewardBatch, features: Any, tmp_path: Path) -> None:
    """Two layers on the unit vector e: 3 (e_0 + e_1 + ... + 0.5) - 2 e_0 + 5."""
    tensors = {
        "layers.0.weight": torch.cat([torch.ones(1, 64), torch.eye(64)[:1]]),
        "layers.0.bias": torch.tensor([0.5, 0.0]),
        "layers.2.weight": torch.tensor([[3.0, -2.0]]),
        "layers.2.bias": torch.tensor([5.0]),
    }
    torch.save(tensors, tmp_path / "head.pth")
    unit = features[0] / lengths(features[0])[:, None]
    marks = 3 * (unit.sum(-1) + 0.5) - 2 * unit[:, 0] + 5
    scores = loaded("aesthetic", model=str(folder), head=str(tmp_path / "head.pth")).score(batch)
    assert scores == pytest.approx(marks.tolist(), abs=1e-5)


def test_pickscore_is_the_logit_of_its_own_caption(folder: Path, batch: RewardBatch, theirs: Any) -> None:
    logits = theirs.logits_per_image.diagonal()
    assert loaded("pickscore", model=str(folder)).score(batch) == pytest.approx(logits.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["clipscore", "pickscore", "hpsv2"])
def test_prompts_may_stand_several_times_in_a_batch(kind: str, folder: Path, batch: RewardBatch, theirs: Any) -> None:
    """As in training, where a group of pictures shares its prompt."""
    reward = loaded(kind, model=str(folder))
    order = [2, 0, 2, 1, 0, 2, 7, 7]
    scores = reward.score(RewardBatch(batch.images, [batch.prompts[i] for i in order]))
    logits = theirs.logits_per_image[range(COUNT), order]
    unit = 1.0 if kind == "pickscore" else float(np.exp(1.7))
    assert scores == pytest.approx((logits / unit).tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["clipscore", "pickscore", "hpsv2", "aesthetic"])
def test_a_score_does_not_depend_on_the_batch(kind: str, folder: Path, batch: RewardBatch, tmp_path: Path) -> None:
    params = {"head": str(write_head(tmp_path / "head.pth"))} if kind == "aesthetic" else {}
    reward = loaded(kind, model=str(folder), **params)
    alone = [
        reward.score(RewardBatch(image[None], [prompt]))[0]
        for image, prompt in zip(batch.images, batch.prompts, strict=True)
    ]
    assert len(set(alone)) == COUNT
    assert reward.score(batch) == pytest.approx(alone, abs=1e-6)


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


def write_head(file: Path, head: nn.Sequential | None = None, **changes: Tensor) -> Path:
    tensors = {**layout(head or laion_head()), **changes}
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)
    return file


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_aesthetic_is_laions_network_on_the_picture(
    ending: str, folder: Path, batch: RewardBatch, theirs: Any, tmp_path: Path
) -> None:
    head = laion_head()
    file = write_head(tmp_path / f"head.{ending}", head)
    with torch.no_grad():
        marks = head(theirs.image_embeds)[:, 0]
    assert marks.std() > 1e-5
    reward = loaded("aesthetic", model=str(folder), head=str(file))
    assert reward.score(batch) == pytest.approx(marks.tolist(), abs=1e-6)
    assert reward.score(RewardBatch(batch.images, batch.prompts[::-1])) == reward.score(batch)


def test_layers_follow_their_numbers(folder: Path, batch: RewardBatch, theirs: Any, tmp_path: Path) -> None:
    """Ten comes after nine."""
    first, second = nn.Linear(64, 3), nn.Linear(3, 1)
    tensors = {"layers.10.weight": second.weight, "layers.10.bias": second.bias}
    tensors |= {"layers.9.weight": first.weight, "layers.9.bias": first.bias}
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, tmp_path / "head.safetensors")
    with torch.no_grad():
        marks = second(first(theirs.image_embeds))[:, 0]
    reward = loaded("aesthetic", model=str(folder), head=str(tmp_path / "head.safetensors"))
    assert reward.score(batch) == pytest.approx(marks.tolist(), abs=1e-5)


def test_aesthetic_without_a_head_is_refused_by_name(folder: Path) -> None:
    for params in ({}, {"model": str(folder)}):
        with pytest.raises(InputError, match=r"\(looks\)\.params\.head: .*sac\+logos\+ava1-l14-linearMSE\.pth"):
            build_rewards([RewardConfig(type="aesthetic", name="looks", params=params)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers.2.weight": torch.zeros(16, 31)}, r"of another shape: layers\.2\.weight is \[16, 31\], \[16, 32\]"),
        ({"layers.7.weight": torch.zeros(2, 4)}, r"of another shape: layers\.7\.weight is \[2, 4\], \[1, 4\]"),
        ({"layers.9.bias": torch.zeros(1)}, r"unknown: layers\.9\.bias"),
    ],
    ids=["layers that do not fit", "two scores", "a bias alone"],
)
def test_a_head_that_does_not_fit_is_refused(
    changes: dict[str, Tensor], said: str, folder: Path, tmp_path: Path
) -> None:
    file = write_head(tmp_path / "head.pth", None, **changes)
    with pytest.raises(InputError, match=rf"head: .*head\.pth: {said}"):
        loaded("aesthetic", model=str(folder), head=str(file))


def test_a_head_for_another_clip_is_refused(folder: Path, tmp_path: Path) -> None:
    torch.save({"layers.0.weight": torch.zeros(1, 768), "layers.0.bias": torch.zeros(1)}, tmp_path / "head.pth")
    with pytest.raises(InputError, match=r"layers\.0\.weight is \[1, 768\], \[1, 64\] is expected"):
        loaded("aesthetic", model=str(folder), head=str(tmp_path / "head.pth"))


def test_a_head_with_activations_is_refused(folder: Path, tmp_path: Path) -> None:
    """LAION's ava+logos-l14-reluMSE.pth has its layers at 0, 3, 6, 9 and 11. Taken as linear, it would be wrong."""
    places = dict(zip((0, 2, 4, 6, 7), (0, 3, 6, 9, 11), strict=True))
    moved = {}
    for name, tensor in laion_head().state_dict().items():
        place, part = name.split(".")
        moved[f"layers.{places[int(place)]}.{part}"] = tensor
    torch.save(moved, tmp_path / "head.pth")
    with pytest.raises(InputError, match=r"more than dropout between layers\.0 and layers\.3; heads with activations"):
        loaded("aesthetic", model=str(folder), head=str(tmp_path / "head.pth"))


# --- what is published ---


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub. The tests are offline: what is not in it cannot be had."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache: Path, repository: str) -> Path:
    """The folder of a repository's only revision."""
    place = cache / f"models--{repository.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    snapshot = place / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    return snapshot


PROCESSOR_FILES = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")
LAION = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def copied(folder: Path, place: Path, *, processor: bool) -> None:
    for file in folder.iterdir():
        if processor or file.name not in PROCESSOR_FILES:
            shutil.copy(file, place)


def test_published_ids(folder: Path, batch: RewardBatch, hub_cache: Path) -> None:
    """pickscore's repository has no tokenizer that is used; LAION's has, and a model that is not."""
    copied(folder, cached(hub_cache, "openai/clip-vit-large-patch14"), processor=True)
    copied(folder, cached(hub_cache, "yuvalkirstain/PickScore_v1"), processor=False)
    laion = cached(hub_cache, LAION)
    for name in (*PROCESSOR_FILES, "config.json"):
        shutil.copy(folder / name, laion)
    for kind in ("clipscore", "pickscore"):
        assert loaded(kind).score(batch) == loaded(kind, model=str(folder)).score(batch)


def openclip_like(seed: int) -> Any:
    """A CLIP as open_clip's are: GELU, heads 64 wide, and a vocabulary that ends with the end token."""
    layers = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    tokens = {"vocab_size": len(VOCABULARY), "eos_token_id": len(VOCABULARY) - 1, "max_position_embeddings": 24}
    text = {**layers, **tokens, "hidden_act": "gelu"}
    vision = {**layers, "image_size": SIZE, "patch_size": 16, "hidden_act": "gelu"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def write_scorer(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    CLIPTokenizer(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[]).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=SIZE).save_pretrained(folder)
    return folder


SYMBOLS = [*string.ascii_lowercase, *string.digits, *'",.']
VOCABULARY = [*SYMBOLS, *(f"{symbol}</w>" for symbol in SYMBOLS), "<|startoftext|>", "<|endoftext|>"]


def to_openclip(model: Any) -> dict[str, Tensor]:
    """The other way round, written on its own: a `CLIPModel`'s tensors as open_clip has them."""
    tensors: dict[str, Tensor] = model.state_dict()
    text, vision = "text_model.", "vision_model."
    result = {
        "logit_scale": tensors["logit_scale"],
        "text_projection": tensors["text_projection.weight"].T.contiguous(),
        "visual.proj": tensors["visual_projection.weight"].T.contiguous(),
        "token_embedding.weight": tensors[f"{text}embeddings.token_embedding.weight"],
        "positional_embedding": tensors[f"{text}embeddings.position_embedding.weight"],
        "visual.class_embedding": tensors[f"{vision}embeddings.class_embedding"],
        "visual.conv1.weight": tensors[f"{vision}embeddings.patch_embedding.weight"],
        "visual.positional_embedding": tensors[f"{vision}embeddings.position_embedding.weight"],
    }
    for part in ("weight", "bias"):
        result[f"ln_final.{part}"] = tensors[f"{text}final_layer_norm.{part}"]
        result[f"visual.ln_pre.{part}"] = tensors[f"{vision}pre_layrnorm.{part}"]
        result[f"visual.ln_post.{part}"] = tensors[f"{vision}post_layernorm.{part}"]
        for here, there in ((text, ""), (vision, "visual.")):
            for layer in range(sum(name.startswith(here) and name.endswith("fc1.bias") for name in tensors)):
                ours, theirs = f"{here}encoder.layers.{layer}.", f"{there}transformer.resblocks.{layer}."
                pieces = [tensors[f"{ours}self_attn.{which}_proj.{part}"] for which in "qkv"]
                result[f"{theirs}attn.in_proj_{part}"] = torch.cat(pieces)
                result[f"{theirs}attn.out_proj.{part}"] = tensors[f"{ours}self_attn.out_proj.{part}"]
                result[f"{theirs}mlp.c_fc.{part}"] = tensors[f"{ours}mlp.fc1.{part}"]
                result[f"{theirs}mlp.c_proj.{part}"] = tensors[f"{ours}mlp.fc2.{part}"]
                for number in "12":
                    result[f"{theirs}ln_{number}.{part}"] = tensors[f"{ours}layer_norm{number}.{part}"]
    return result


def test_hpsv2_takes_the_published_file_of_its_version(
    folder: Path, batch: RewardBatch, hub_cache: Path, tmp_path: Path
) -> None:
    """2.1 unless it is told otherwise. The tokenizer and the image processor are LAION's."""
    published = cached(hub_cache, "xswu/HPSv2")
    expected = {}
    for version, file, seed in (("2.0", "HPS_v2_compressed.pt", 1), ("2.1", "HPS_v2.1_compressed.pt", 2)):
        model = openclip_like(seed)
        torch.save({"state_dict": to_openclip(model)}, published / file)
        write_scorer(tmp_path / version, model)
        expected[version] = loaded("hpsv2", model=str(tmp_path / version)).score(batch)
    copied(tmp_path / "2.1", cached(hub_cache, LAION), processor=True)
    assert expected["2.0"] != expected["2.1"]
    assert loaded("hpsv2").score(batch) == pytest.approx(expected["2.1"], abs=1e-6)
    for version in ("2.0", "2.1", 2.0, 2.1):
        scores = loaded("hpsv2", version=version).score(batch)
        assert scores == pytest.approx(expected[str(version)], abs=1e-6)


@pytest.mark.usefixtures("hub_cache")
def test_hpsv2_needs_the_hub_for_its_published_file(folder: Path) -> None:
    with pytest.raises(InputError, match=r"model: HPS_v2\.1_compressed\.pt of 'xswu/HPSv2' is neither here nor"):
        loaded("hpsv2", processor=str(folder))


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("hpsv2", {"version": "3"}, r"version: expected '2\.0' or '2\.1', got \"3\""),
        ("hpsv2", {"version": "2.0", "model": "mini"}, "version: '2.0' is for the published weights; leave it out"),
        ("pickscore", {"divide_by": 0}, "divide_by: expected a number greater than 0, got 0"),
        ("pickscore", {"divide_by": "x"}, 'divide_by: expected a valid number, got "x"'),
    ],
)
def test_bad_params_are_refused_before_anything_is_loaded(kind: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"\(looks\)\.params\.{said}"):
        build_rewards([RewardConfig(type=kind, name="looks", params=params)])


@pytest.mark.parametrize("kind", ["clipscore", "pickscore", "hpsv2", "aesthetic"])
def test_the_processor_may_be_elsewhere(kind: str, folder: Path, batch: RewardBatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "processor").mkdir()
    copied(folder, tmp_path / "model", processor=False)
    for name in PROCESSOR_FILES:
        shutil.copy(folder / name, tmp_path / "processor")
    params = {"head": str(write_head(tmp_path / "head.pth"))} if kind == "aesthetic" else {}
    parts = loaded(kind, model=str(tmp_path / "model"), processor=str(tmp_path / "processor"), **params)
    assert parts.score(batch) == loaded(kind, model=str(folder), **params).score(batch)
    with pytest.raises(InputError, match=r"'r' cannot be loaded.*/model"):
        loaded(kind, model=str(tmp_path / "model"), **params)


def test_older_configs_end_texts_with_the_highest_number(batch: RewardBatch, tmp_path: Path) -> None:
    """Their `eos_token_id` is 2, whatever the tokenizer says."""
    model = openclip_like(3)
    expected = write_scorer(tmp_path / "new", model)
    model.config.text_config.eos_token_id = 2
    older = write_scorer(tmp_path / "old", model)
    assert loaded("pickscore", model=str(older)).score(batch) == loaded("pickscore", model=str(expected)).score(batch)


@pytest.mark.parametrize("wrong", ["missing", "of another shape"])
def test_a_model_with_holes_is_refused(wrong: str, folder: Path, tmp_path: Path) -> None:
    """transformers would load it with a warning, and draw what is missing at random."""
    copied(folder, tmp_path, processor=True)
    tensors = load_file(folder / "model.safetensors")
    changed = {} if wrong == "missing" else {"visual_projection.weight": torch.zeros(2, 3)}
    kept = {name: tensor for name, tensor in tensors.items() if name != "visual_projection.weight"}
    save_file({**kept, **changed}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=r"'r' cannot be loaded.*model: .*another shape \(1\), such as visual_projection"
    ):
        loaded("clipscore", model=str(tmp_path))


def test_sizes_of_the_published_networks() -> None:
    """CLIP ViT-L/14 and LAION's head, without values: the figures of the docs. ViT-H/14 is in test_openclip.py."""
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = CLIPConfig(text_config=text, vision_config={**vision, "patch_size": 14}, projection_dim=768)
    with torch.device("meta"):
        clip = CLIPModel(config)
        head = nn.Sequential(*(nn.Linear(*size) for size in pairwise((768, 1024, 128, 64, 16, 1))))
    assert sum(tensor.numel() for tensor in clip.parameters()) == 427_616_513
    assert sum(tensor.numel() for tensor in head.parameters()) == 927_969


# --- what they declare ---


@pytest.mark.parametrize("kind", ["clipscore", "pickscore", "hpsv2", "aesthetic"])
def test_half_precision_stays_in_range_and_close(kind: str, folder: Path, batch: RewardBatch, tmp_path: Path) -> None:
    params = {"head": str(write_head(tmp_path / "head.pth"))} if kind == "aesthetic" else {}
    reward = loaded(kind, model=str(folder), **params)
    with torch.autocast("cpu", torch.bfloat16):
        scores = torch.tensor(reward.score(batch), dtype=torch.float64)
    low, high = reward.traits.range
    assert reward.traits.deterministic
    assert ((scores >= low) & (scores <= high)).all()
    assert scores.tolist() == pytest.approx(reward.score(batch), abs=0.05)
    assert not torch.equal(scores, scores.bfloat16().double()), "the last steps are to be in float32"


def test_no_cosine_passes_its_range() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1000, 1024, generator=generator) * torch.logspace(-3, 3, 1000)[:, None]
    with torch.autocast("cpu", torch.bfloat16):
        units = unit_vectors(vectors.bfloat16())
        cosines = (units * units).sum(-1)
    low, high = COSINE
    assert low < -float(cosines.max()) < -0.999
    assert 0.999 < float(cosines.max()) < high


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
