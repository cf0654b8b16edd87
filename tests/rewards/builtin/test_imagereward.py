"""ImageReward on small random checkpoints in the published format, against BLIP written out from its equations.

The reference works on the checkpoint's own names and shares no code with the reward.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.rewards.builtin.imagereward import TEXT_FIELDS, empty_network, to_pixels
from marble_rl.rewards.core.base import RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from reward_device import DEVICE

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "##dish", "blue", "marble", "on", "the", "sign", ","]
TOKENS = {word: place for place, word in enumerate([*WORDS, "[DEC]", "[ENC]"])}
TEXT_LENGTH = 35
MED_CONFIG = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_norm_eps": 1e-3,
    "max_position_embeddings": 40,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": len(TOKENS),
    # Not the ViT's width in the published file either.
    "encoder_width": 768,
    "add_cross_attention": True,
}
PUBLISHED_MED_CONFIG = MED_CONFIG | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 30524,
}
VIT = {"width": 128, "depth": 2, "patch": 8, "size": 32, "mlp": 160}
PUBLISHED_VIT = {"width": 1024, "depth": 24, "patch": 16, "size": 224, "mlp": 4096}
HEAD = (48, 32, 16, 8, 4, 1)
PUBLISHED_HEAD = (768, 1024, 128, 64, 16, 1)

Shapes = dict[str, tuple[int, ...]]


# --- the published format ---


def linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def vit_shapes(vit: dict[str, int]) -> Shapes:
    width, patch, prefix = vit["width"], vit["patch"], "blip.visual_encoder."
    shapes: Shapes = {
        f"{prefix}cls_token": (1, 1, width),
        f"{prefix}pos_embed": (1, (vit["size"] // patch) ** 2 + 1, width),
        f"{prefix}patch_embed.proj.weight": (width, 3, patch, patch),
        f"{prefix}patch_embed.proj.bias": (width,),
        **norm(f"{prefix}norm", width),
    }
    for block in (f"{prefix}blocks.{i}." for i in range(vit["depth"])):
        shapes |= norm(f"{block}norm1", width) | norm(f"{block}norm2", width)
        shapes |= linear(f"{block}attn.qkv", width, 3 * width) | linear(f"{block}attn.proj", width, width)
        shapes |= linear(f"{block}mlp.fc1", width, vit["mlp"]) | linear(f"{block}mlp.fc2", vit["mlp"], width)
    return shapes


def text_shapes(config: dict[str, Any], vision_width: int) -> Shapes:
    width, inner, prefix = config["hidden_size"], config["intermediate_size"], "blip.text_encoder."
    shapes: Shapes = {
        f"{prefix}embeddings.position_ids": (1, config["max_position_embeddings"]),
        f"{prefix}embeddings.word_embeddings.weight": (config["vocab_size"], width),
        f"{prefix}embeddings.position_embeddings.weight": (config["max_position_embeddings"], width),
        **norm(f"{prefix}embeddings.LayerNorm", width),
    }
    for layer in (f"{prefix}encoder.layer.{i}." for i in range(config["num_hidden_layers"])):
        for attention, seen in ((f"{layer}attention.", width), (f"{layer}crossattention.", vision_width)):
            shapes |= linear(f"{attention}self.query", width, width)
            shapes |= linear(f"{attention}self.key", seen, width) | linear(f"{attention}self.value", seen, width)
            shapes |= linear(f"{attention}output.dense", width, width) | norm(f"{attention}output.LayerNorm", width)
        shapes |= linear(f"{layer}intermediate.dense", width, inner)
        shapes |= linear(f"{layer}output.dense", inner, width) | norm(f"{layer}output.LayerNorm", width)
    return shapes


def checkpoint_shapes(vit: dict[str, int], config: dict[str, Any], head: tuple[int, ...]) -> Shapes:
    shapes = vit_shapes(vit) | text_shapes(config, vit["width"])
    shapes |= linear("blip.vision_proj", vit["width"], 256) | linear("blip.text_proj", config["hidden_size"], 256)
    for place, inputs, outputs in zip((0, 2, 4, 6, 7), head[:-1], head[1:], strict=True):
        shapes |= linear(f"mlp.layers.{place}", inputs, outputs)
    return shapes


def random_checkpoint() -> dict[str, Tensor]:
    """Large enough weights that every part moves the score; a faint picture, so that the ViT's epsilon does too."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in checkpoint_shapes(VIT, MED_CONFIG, HEAD).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("position_ids"):
            tensors[name] = torch.arange(shape[-1])[None]
        elif "norm" in name.lower() and name.endswith("weight"):
            tensors[name] = 1 + 0.2 * noise
        elif any(part in name for part in ("cls_token", "pos_embed", "patch_embed")):
            tensors[name] = 2e-3 * noise
        elif "embeddings" in name:
            tensors[name] = 0.5 * noise
        elif len(shape) == 2:
            tensors[name] = (1.0 if name.startswith("mlp") else 1.5) / math.sqrt(shape[1]) * noise
        else:
            tensors[name] = 0.1 * noise
    return tensors


# --- BLIP from its equations ---


class Reference:
    """ViT and med.py's text encoder, on a checkpoint's tensors, in float64."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def score(self, image: np.ndarray, text: str) -> float:
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
        deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])
        pixels = ((torch.from_numpy(image).double() / 255 - mean) / deviation).permute(2, 0, 1)
        state = self.read(tokenized(text), self.see(pixels))[0]
        for place in (0, 2, 4, 6, 7):
            state = self.linear(f"mlp.layers.{place}", state)
        return (float(state) - 0.16717362830052426) / 1.0333394966054072

    def see(self, pixels: Tensor) -> Tensor:
        """[3, S, S] -> [1 + patches, W]; each block adds to the stream what it makes of its normalised self."""
        prefix, patch = "blip.visual_encoder.", VIT["patch"]
        rows = pixels.unfold(1, patch, patch).unfold(2, patch, patch)
        patches = rows.permute(1, 2, 0, 3, 4).reshape(-1, 3 * patch * patch)
        kernel = self.tensors[f"{prefix}patch_embed.proj.weight"].flatten(1)
        embedded = patches @ kernel.T + self.tensors[f"{prefix}patch_embed.proj.bias"]
        states = torch.cat([self.tensors[f"{prefix}cls_token"][0], embedded]) + self.tensors[f"{prefix}pos_embed"][0]
        for block in (f"{prefix}blocks.{i}." for i in range(VIT["depth"])):
            query, key, value = self.linear(f"{block}attn.qkv", self.norm(f"{block}norm1", states, 1e-6)).chunk(3, -1)
            states = states + self.linear(f"{block}attn.proj", attend(query, key, value, VIT["width"] // 64))
            inner = gelu(self.linear(f"{block}mlp.fc1", self.norm(f"{block}norm2", states, 1e-6)))
            states = states + self.linear(f"{block}mlp.fc2", inner)
        return self.norm(f"{prefix}norm", states, 1e-6)

    def read(self, tokens: list[int], seen: Tensor) -> Tensor:
        """[T], [P, W] -> [T, D]; no padding, since nothing attends to it. The sums are normalised, as in BERT."""
        prefix = "blip.text_encoder."
        words = self.tensors[f"{prefix}embeddings.word_embeddings.weight"][tokens]
        places = self.tensors[f"{prefix}embeddings.position_embeddings.weight"][: len(tokens)]
        states = self.norm(f"{prefix}embeddings.LayerNorm", words + places)
        for layer in (f"{prefix}encoder.layer.{i}." for i in range(MED_CONFIG["num_hidden_layers"])):
            states = self.attention(f"{layer}attention.", states, states)
            states = self.attention(f"{layer}crossattention.", states, seen)
            inner = gelu(self.linear(f"{layer}intermediate.dense", states))
            states = self.norm(f"{layer}output.LayerNorm", self.linear(f"{layer}output.dense", inner) + states)
        return states

    def attention(self, name: str, states: Tensor, seen: Tensor) -> Tensor:
        query = self.linear(f"{name}self.query", states)
        key, value = self.linear(f"{name}self.key", seen), self.linear(f"{name}self.value", seen)
        found = attend(query, key, value, MED_CONFIG["num_attention_heads"])
        return self.norm(f"{name}output.LayerNorm", self.linear(f"{name}output.dense", found) + states)

    def linear(self, name: str, states: Tensor) -> Tensor:
        return states @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def norm(self, name: str, states: Tensor, epsilon: float = MED_CONFIG["layer_norm_eps"]) -> Tensor:
        centred = states - states.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    found = []
    for q, k, v in zip(query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1), strict=True):
        found.append((q @ k.T / math.sqrt(q.shape[-1])).softmax(-1) @ v)
    return torch.cat(found, -1)


def gelu(states: Tensor) -> Tensor:
    return states * (1 + torch.erf(states / math.sqrt(2))) / 2


def tokenized(text: str) -> list[int]:
    """WordPiece for the words that the tests use."""
    pieces = text.replace(",", " ,").replace("Reddish", "red ##dish").split()
    middle = [TOKENS.get(piece if piece in TOKENS else piece.lower(), TOKENS["[UNK]"]) for piece in pieces]
    return [TOKENS["[CLS]"], *middle[: TEXT_LENGTH - 2], TOKENS["[SEP]"]]


# --- fixtures ---


def write(folder: Path, tensors: Any, config: dict[str, Any] = MED_CONFIG, words: list[str] | None = WORDS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(config))
    if words is not None:
        (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


def loaded(model: Path | str | None = None) -> Any:
    params = {} if model is None else {"model": str(model)}
    configs = [RewardConfig(type="imagereward", name="r", params=params)]
    rewards = build_rewards(configs)
    Scorer(configs, rewards).load(DEVICE)
    return rewards["r"]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return random_checkpoint()


@pytest.fixture(scope="module")
def folder(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("imagereward"), tensors)


@pytest.fixture(scope="module")
def batch() -> RewardBatch:
    texts = [
        "a red marble",
        "A Reddish, blue marble on the sign",
        "",
        "the zebra [ENC] on [DEC] the sign",
        "a red marble " * 20,
        "a red marble",
    ]
    images = np.random.default_rng(3).integers(0, 256, (len(texts), VIT["size"], VIT["size"], 3), dtype=np.uint8)
    return RewardBatch(images, [Prompt(i, text, "s") for i, text in enumerate(texts)])


def expected(tensors: dict[str, Tensor], batch: RewardBatch) -> list[float]:
    reference = Reference(tensors)
    pairs = zip(batch.images, batch.prompts, strict=True)
    return [reference.score(image, prompt.text) for image, prompt in pairs]


# --- scores ---


def test_scores_are_the_references(folder: Path, tensors: dict[str, Tensor], batch: RewardBatch) -> None:
    scores = loaded(folder).score(batch)
    assert np.std(scores) > 0.05
    assert scores == pytest.approx(expected(tensors, batch), abs=1e-5)


@pytest.mark.parametrize(
    "part",
    [
        "visual_encoder.cls_token",
        "visual_encoder.pos_embed",
        "visual_encoder.blocks.1.attn.qkv.weight",
        "text_encoder.encoder.layer.0.crossattention.self.key.weight",
        "text_encoder.encoder.layer.1.attention.self.value.weight",
    ],
)
def test_the_reference_would_notice(part: str, tensors: dict[str, Tensor], batch: RewardBatch) -> None:
    """Parity proves something only of the parts that move the score."""
    name = f"blip.{part}"
    changed = expected(tensors | {name: tensors[name].flip(-1)}, batch)
    assert np.abs(np.subtract(changed, expected(tensors, batch))).max() > 1e-3


def test_half_precision_checkpoints_are_read_in_full(
    tensors: dict[str, Tensor], batch: RewardBatch, tmp_path: Path
) -> None:
    halved = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    full = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in halved.items()}
    assert loaded(write(tmp_path, halved)).score(batch) == pytest.approx(expected(full, batch), abs=1e-5)


@pytest.mark.parametrize(("raw", "score"), [(0.16717362830052426, 0.0), (1.0, 0.80595620), (-2.0, -2.09725229)])
def test_the_heads_output_is_standardised(
    raw: float, score: float, tensors: dict[str, Tensor], batch: RewardBatch, tmp_path: Path
) -> None:
    """A head that says the same of everything."""
    last = {"mlp.layers.7.weight": torch.zeros(1, 4), "mlp.layers.7.bias": torch.tensor([raw])}
    scores = loaded(write(tmp_path, tensors | last)).score(batch)
    assert scores == pytest.approx([score] * len(batch.prompts), abs=1e-6)


def test_a_score_does_not_depend_on_the_batch(folder: Path, batch: RewardBatch) -> None:
    reward = loaded(folder)
    whole = reward.score(batch)
    for size in (1, 2, 5):
        parts: list[float] = []
        for start in range(0, len(batch.prompts), size):
            rows = slice(start, start + size)
            parts += reward.score(RewardBatch(batch.images[rows], batch.prompts[rows]))
        assert parts == pytest.approx(whole, abs=1e-5)


def test_35_tokens_of_a_prompt_are_read(folder: Path, batch: RewardBatch) -> None:
    """[CLS], 33 words, [SEP]."""
    reward = loaded(folder)

    def score(text: str) -> float:
        return float(reward.score(RewardBatch(batch.images[:1], [Prompt(0, text, "s")]))[0])

    words = ["red", "blue", "marble"] * 11
    assert score(" ".join([*words, "sign"])) == score(" ".join(words))
    assert abs(score(" ".join(words[:32])) - score(" ".join(words))) > 1e-4


@pytest.mark.parametrize(("height", "width"), [(48, 80), (81, 48), (20, 20), (32, 32)])
def test_the_middle_of_the_picture_is_resized_bicubically(height: int, width: int) -> None:
    """Against torch's own bicubic filter; pillow rounds after each direction, so to one grey level."""
    size = 32
    # Smooth, as photographs are: the filters round and clip differently at hard edges.
    coarse = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    image = (F.interpolate(coarse, (height, width), mode="bilinear") * 255).round()
    resized = {
        (48, 80): (32, 53),
        (81, 48): (54, 32),
        (20, 20): (32, 32),
        (32, 32): (32, 32),
    }[height, width]
    large = F.interpolate(image, resized, mode="bicubic", antialias=True)[0]
    top, left = {53: (0, 10), 54: (11, 0), 32: (0, 0)}[max(resized)]
    square = large[:, top : top + size, left : left + size]
    mean, deviation = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = to_pixels(image[0].permute(1, 2, 0).to(torch.uint8).numpy()[None], size)[0]
    levels = (pixels * torch.tensor(deviation)[:, None, None] + torch.tensor(mean)[:, None, None]) * 255
    assert (levels - square).abs().max() < 1.1


def test_pictures_of_another_size_are_scored_by_their_middle(folder: Path, batch: RewardBatch) -> None:
    """Wider by black on both sides."""
    reward = loaded(folder)
    wide = RewardBatch(np.pad(batch.images, ((0, 0), (0, 0), (12, 12), (0, 0))), batch.prompts)
    assert reward.score(wide) == reward.score(batch)


# --- the checkpoint ---


def test_the_published_sizes_are_understood() -> None:
    """ViT-L/16 at 224, BERT-base; with its unused tensors the file is the 1.79 GB that the hub shows."""
    shapes = checkpoint_shapes(PUBLISHED_VIT, PUBLISHED_MED_CONFIG, PUBLISHED_HEAD)
    published = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    assert sum(t.numel() for n, t in published.items() if "position_ids" not in n) * 4 == 1_786_663_812
    network = empty_network(published, {name: PUBLISHED_MED_CONFIG[name] for name in TEXT_FIELDS})
    assert sum(parameter.numel() for parameter in network.parameters()) == 446_206_689
    assert network.image_size == 224
    assert network.vision.config.num_attention_heads == 16
    assert network.text.config.num_attention_heads == 12


@pytest.mark.parametrize(
    "name",
    [
        "blip.visual_encoder.pos_embed",
        "blip.visual_encoder.blocks.0.mlp.fc1.weight",
        "blip.visual_encoder.blocks.1.attn.qkv.bias",
        "blip.visual_encoder.norm.weight",
        "blip.text_encoder.embeddings.word_embeddings.weight",
        "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight",
        "mlp.layers.4.weight",
        "mlp.layers.7.bias",
    ],
)
def test_a_missing_tensor_is_named(name: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, {key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(InputError, match=rf"'r' cannot be loaded.*ImageReward\.pt: missing: {name};"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "name", ["blip.visual_encoder.blocks.0.attn.gate", "blip.text_projection.weight", "mlp.layers.9.bias", "module.x"]
)
def test_an_unknown_tensor_is_named(name: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors | {name: torch.zeros(2)})
    with pytest.raises(InputError, match=rf"'r' cannot be loaded.*ImageReward\.pt: unknown: {name};"):
        loaded(tmp_path)


def test_everything_wrong_is_said_at_once(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    changed = {name: tensor for name, tensor in tensors.items() if ".layer.1." not in name}
    changed |= {"extra": torch.zeros(1), "mlp.layers.0.bias": torch.zeros(5)}
    write(tmp_path, changed)
    said = (
        r"missing: .* and 16 more; unknown: extra; of another shape: mlp\.layers\.0\.bias is \[5\], \[32\] is expected"
    )
    with pytest.raises(InputError, match=said):
        loaded(tmp_path)


def test_a_text_config_of_another_model_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors, MED_CONFIG | {"intermediate_size": 96})
    with pytest.raises(InputError, match=r"of another shape: .*layer\.0\.intermediate\.dense\.weight is \[80, 48\]"):
        loaded(tmp_path)


def test_position_ids_and_projections_may_be_absent(
    folder: Path, tensors: dict[str, Tensor], batch: RewardBatch, tmp_path: Path
) -> None:
    kept = {name: t for name, t in tensors.items() if "position_ids" not in name and "_proj." not in name}
    assert len(kept) == len(tensors) - 5
    assert loaded(write(tmp_path, kept)).score(batch) == loaded(folder).score(batch)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def test_a_checkpoint_is_never_unpickled(
    tensors: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, tensors | {"mlp.layers.0.weight": Evil()})
    with pytest.raises(InputError, match=r"'r' cannot be loaded.*ImageReward\.pt cannot be read as tensors"):
        loaded(tmp_path)
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"model": {"mlp.layers.0.weight": torch.zeros(1)}}])
def test_a_file_of_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ImageReward\.pt holds something other than tensors by name"):
        loaded(write(tmp_path, content))


def test_a_broken_download_is_refused(folder: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors)
    whole = (folder / "ImageReward.pt").read_bytes()
    (tmp_path / "ImageReward.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"ImageReward\.pt cannot be read as tensors"):
        loaded(tmp_path)


# --- where it is ---


def test_the_checkpoint_may_be_named_itself(folder: Path, batch: RewardBatch) -> None:
    assert loaded(folder / "ImageReward.pt").score(batch) == loaded(folder).score(batch)


@pytest.mark.parametrize("name", ["nowhere", "nowhere.pt"])
def test_a_missing_folder_is_bad_input(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"'r' cannot be loaded.*no such folder or file: .*{name}"):
        loaded(tmp_path / name)


@pytest.mark.parametrize("name", ["ImageReward.pt", "med_config.json"])
def test_a_missing_file_is_named(name: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors)
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match=rf"'r' cannot be loaded.*{name} is missing; give .*zai-org/ImageReward"):
        loaded(tmp_path)


@pytest.mark.parametrize(("content", "said"), [("{}", "has no 'vocab_size'"), ("[]", "JSON"), ("{", "JSON")])
def test_a_broken_text_config_is_bad_input(content: str, said: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors)
    (tmp_path / "med_config.json").write_text(content)
    with pytest.raises(InputError, match=rf"'r' cannot be loaded.*med_config\.json.*{said}"):
        loaded(tmp_path)


def test_a_vocabulary_of_another_size_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors, words=[*WORDS, "more"])
    with pytest.raises(InputError, match=r"has 17 tokens with \[DEC\] and \[ENC\], med_config\.json says 16"):
        loaded(tmp_path)


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
    return place / "snapshots" / ("0" * 40)


def test_the_default_is_the_published_model_of_the_hub(
    folder: Path, tensors: dict[str, Tensor], batch: RewardBatch, hub_cache: Path
) -> None:
    """Which has no tokenizer: that comes from BERT."""
    write(cached(hub_cache, "zai-org/ImageReward"), tensors, words=None)
    bert = cached(hub_cache, "bert-base-uncased")
    bert.mkdir(parents=True)
    (bert / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (bert / "config.json").write_text('{"model_type": "bert"}')
    assert loaded().score(batch) == loaded(folder).score(batch)


@pytest.mark.usefixtures("hub_cache")
def test_a_model_that_the_hub_does_not_give_is_explained() -> None:
    said = r"'r' cannot be loaded.*med_config\.json of 'some/model' is neither here.*https://huggingface\.co/some/model"
    with pytest.raises(InputError, match=said):
        loaded("some/model")


@pytest.mark.usefixtures("hub_cache")
def test_a_tokenizer_that_cannot_be_had_is_explained(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tensors, words=None)
    with pytest.raises(InputError, match=r"'r' cannot be loaded.*put the vocab\.txt of bert-base-uncased into .*model"):
        loaded(folder)
