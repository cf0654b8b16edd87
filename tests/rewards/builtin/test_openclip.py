"""Checkpoints of open_clip, against its network written out with torch's own attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPTokenizer

from marble_rl.errors import InputError
from marble_rl.rewards.builtin.clip import Hpsv2
from marble_rl.rewards.builtin.openclip import read_model, to_transformers
from marble_rl.rewards.core.base import Images, RewardBatch
from marble_rl.types import Prompt
from reward_device import DEVICE

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "!", "<|startoftext|>", "<|endoftext|>"]
"""As in CLIP's, the start and end tokens have the highest numbers."""
START, END = len(VOCABULARY) - 2, len(VOCABULARY) - 1
LENGTH = 12
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        parts = {"c_fc": nn.Linear(width, mlp), "gelu": activation(), "c_proj": nn.Linear(mlp, width)}
        self.mlp = nn.Sequential(OrderedDict(parts))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        seen = self.ln_1(x)
        x = x + self.attn(seen, seen, seen, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, mlp: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, heads, mlp, activation) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Visual(nn.Module):
    def __init__(self, side: int, patch: int, embedding: int, width: int, **tower: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty((side // patch) ** 2 + 1, width))
        self.ln_pre = nn.LayerNorm(width)
        self.transformer = Transformer(width=width, **tower)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Parameter(torch.empty(width, embedding))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """With open_clip's names, so that its state dict is a checkpoint."""

    def __init__(
        self, vision: Mapping[str, int], text: Mapping[str, int], embedding: int, activation: type[nn.Module] = nn.GELU
    ) -> None:
        super().__init__()
        tower = {key: text[key] for key in ("width", "layers", "heads", "mlp")}
        self.visual = Visual(embedding=embedding, activation=activation, **vision)
        self.transformer = Transformer(activation=activation, **tower)
        self.token_embedding = nn.Embedding(text["vocabulary"], text["width"])
        self.positional_embedding = nn.Parameter(torch.empty(text["length"], text["width"]))
        self.ln_final = nn.LayerNorm(text["width"])
        self.text_projection = nn.Parameter(torch.empty(text["width"], embedding))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def encode_text(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.positional_embedding
        above = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        x = self.ln_final(self.transformer(x, above))
        return x[torch.arange(len(x)), tokens.argmax(-1)] @ self.text_projection


TEXT = {"vocabulary": len(VOCABULARY), "length": LENGTH, "width": 64, "layers": 2, "heads": 1, "mlp": 96}
VISION = {"side": 16, "patch": 4, "width": 64, "layers": 2, "heads": 1, "mlp": 128}
SIZES: dict[str, tuple[dict[str, int], dict[str, int], int]] = {
    "small": (VISION, TEXT, 24),
    "towers of other sizes": (
        {**VISION, "side": 20, "patch": 5, "width": 192, "layers": 1, "heads": 3},
        {**TEXT, "width": 128, "layers": 3, "heads": 2},
        40,
    ),
    "sixteen heads of 80, as ViT-H": ({**VISION, "width": 1280, "layers": 1, "heads": 16, "mlp": 32}, TEXT, 32),
}
VIT_H = (
    {"side": 224, "patch": 14, "width": 1280, "layers": 32, "heads": 16, "mlp": 5120},
    {"vocabulary": 49408, "length": 77, "width": 1024, "layers": 24, "heads": 16, "mlp": 4096},
    1024,
)


def network(size: str = "small", activation: type[nn.Module] = nn.GELU) -> OpenClip:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        clip = OpenClip(*SIZES[size], activation)
        for name, tensor in clip.named_parameters():
            if name != "logit_scale":
                tensor.normal_(float(tensor.ndim == 1 and name.endswith("weight")), 2 * tensor.shape[-1] ** -0.5)
    return clip.eval()


TOKENS = torch.tensor([[START, 3, 30, END, 0, 0], [START, 7, 8, 9, 40, END], [START, 40, END, 0, 0, 0]])


def padded(padding: int) -> Tensor:
    filled = torch.where((TOKENS == END).cumsum(1) - (TOKENS == END).long() > 0, padding, TOKENS)
    return F.pad(filled, (0, LENGTH - TOKENS.shape[1]), value=padding)


@pytest.mark.parametrize("size", list(SIZES))
def test_embeddings_are_open_clips(size: str) -> None:
    theirs = network(size)
    ours = to_transformers(theirs.state_dict()).eval()
    side = SIZES[size][0]["side"]
    pixels = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = ours(input_ids=padded(0), pixel_values=pixels)
        images, texts = F.normalize(theirs.visual(pixels)), F.normalize(theirs.encode_text(padded(0)))
        logits = theirs.logit_scale.exp() * images @ texts.T
    assert torch.allclose(output.image_embeds, images, atol=1e-5)
    assert torch.allclose(output.text_embeds, texts, atol=1e-5)
    assert torch.allclose(output.logits_per_image, logits, atol=1e-4)
    assert logits.std() > 0.1


def test_the_activation_matters() -> None:
    """Otherwise the comparison above would not notice it."""
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one, other = (network(activation=kind).visual(pixels) for kind in (nn.GELU, QuickGELU))
    assert not torch.allclose(one, other, atol=1e-3)


def test_padding_changes_no_embedding() -> None:
    """Neither open_clip's zeros, nor the end token with which transformers' CLIP tokenizer pads; nor none at all."""
    ours = to_transformers(network().state_dict()).eval()
    with torch.no_grad():
        zeros, ends = (ours.text_model(input_ids=padded(filler)).pooler_output for filler in (0, END))
        alone = ours.text_model(input_ids=TOKENS[2:, :3]).pooler_output
    assert torch.allclose(zeros, ends, atol=1e-6)
    assert torch.allclose(zeros[2:], alone, atol=1e-6)


def test_sizes_of_the_published_network() -> None:
    """ViT-H/14, without values: 986 million parameters, in half precision the 1.97 GB of HPSv2's files."""
    with torch.device("meta"):
        tensors = OpenClip(*VIT_H).state_dict()
        model = to_transformers(tensors)
    vision, text = model.config.vision_config, model.config.text_config
    assert (vision.num_attention_heads, text.num_attention_heads) == (16, 16)
    assert (vision.image_size, vision.patch_size, vision.hidden_act, text.eos_token_id) == (224, 14, "gelu", 49407)
    count = sum(tensor.numel() for tensor in model.parameters())
    assert count == sum(tensor.numel() for tensor in tensors.values()) == 986_109_441


# --- files ---


def wrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", ["plain", "with state_dict", "with module", "safetensors"])
def test_every_form_of_the_file_is_read(form: str, tmp_path: Path) -> None:
    tensors = network().state_dict()
    file = tmp_path / ("clip.safetensors" if form == "safetensors" else "clip.pt")
    if form == "safetensors":
        save_file(tensors, file)
    else:
        training = {"epoch": 3, "name": "run", "state_dict": tensors}
        torch.save({"plain": tensors, "with state_dict": training, "with module": wrapped(tensors)}[form], file)
    model, expected = read_model(file, "model"), to_transformers(tensors)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_half_precision_is_read_as_float32(tmp_path: Path) -> None:
    torch.save({name: tensor.half() for name, tensor in network().state_dict().items()}, tmp_path / "clip.pt")
    assert {tensor.dtype for tensor in read_model(tmp_path / "clip.pt", "model").parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "name", ["visual.proj", "token_embedding.weight", "transformer.resblocks.1.attn.in_proj_bias", "logit_scale"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    torch.save({key: tensor for key, tensor in network().state_dict().items() if key != name}, tmp_path / "clip.pt")
    with pytest.raises(InputError, match=rf"model: .*clip\.pt: missing: {name}; give a checkpoint of open_clip"):
        read_model(tmp_path / "clip.pt", "model")


@pytest.mark.parametrize("name", ["logit_bias", "visual.transformer.resblocks.0.ls_1.gamma", "attn_mask"])
def test_an_unknown_tensor_is_named(name: str, tmp_path: Path) -> None:
    torch.save({**network().state_dict(), name: torch.zeros(2)}, tmp_path / "clip.pt")
    with pytest.raises(InputError, match=rf"clip\.pt: unknown: {name};"):
        read_model(tmp_path / "clip.pt", "model")


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    torch.save({**network().state_dict(), "visual.proj": torch.zeros(64, 25)}, tmp_path / "clip.pt")
    with pytest.raises(InputError, match=r"of another shape: visual\.proj is \[64, 25\], \[64, 24\] is expected"):
        read_model(tmp_path / "clip.pt", "model")


@pytest.mark.parametrize(("tower", "width"), [("vision", 96), ("vision", 1288), ("text", 96)])
def test_a_width_without_a_known_number_of_heads_is_refused(tower: str, width: int) -> None:
    vision, text, embedding = SIZES["small"]
    changed = {"vision": vision, "text": text}
    changed[tower] = {**changed[tower], "width": width}
    with torch.device("meta"):
        tensors = OpenClip(changed["vision"], changed["text"], embedding).state_dict()
    with pytest.raises(InputError, match=f"the {tower} tower is {width} wide"):
        to_transformers(tensors)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


@pytest.mark.parametrize("content", [{"state_dict": {"visual.proj": Evil()}}, Evil()])
def test_nothing_is_unpickled(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(content, tmp_path / "clip.pt")
    with pytest.raises(InputError, match=r"clip\.pt cannot be read as tensors"):
        read_model(tmp_path / "clip.pt", "model")
    assert "unpickled" not in capsys.readouterr().out


# --- the reward ---


def write_processor(folder: Path, padding: str = "<|endoftext|>", side: int = 16) -> Path:
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    CLIPTokenizer(vocab=vocabulary, merges=[], pad_token=padding).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": side}, crop_size=side).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As HPSv2's are published, but for their half precision."""
    file = tmp_path_factory.mktemp("open_clip") / "HPS_v2.1_compressed.pt"
    torch.save({"state_dict": network().state_dict()}, file)
    return file


def pictures(height: int, width: int) -> Images:
    return np.random.default_rng(2).integers(0, 256, (4, height, width, 3), dtype=np.uint8)


PROMPTS = ["a b", "xyz", "a very long text that is cut", "q"]


def tokenized(prompt: str) -> list[int]:
    """By hand: letters, the last of each word with its mark; open_clip ends what is too long with the end token."""
    pieces = [piece for word in prompt.split() for piece in (*word[:-1], f"{word[-1]}</w>")]
    tokens = [START, *(VOCABULARY.index(piece) for piece in pieces[: LENGTH - 2]), END]
    return tokens + [0] * (LENGTH - len(tokens))


def cosines(squares: Images) -> list[float]:
    """open_clip's network on pictures [4, 16, 16, 3] and PROMPTS."""
    shares = torch.from_numpy(squares).permute(0, 3, 1, 2) / 255
    pixels = (shares - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    clip = network()
    with torch.no_grad():
        images, texts = clip.visual(pixels), clip.encode_text(torch.tensor([tokenized(prompt) for prompt in PROMPTS]))
    return torch.cosine_similarity(images, texts).tolist()


def scores(checkpoint: Path, processor: Path, images: Images) -> list[float]:
    reward = Hpsv2(model=str(checkpoint), processor=str(processor))
    reward.load(DEVICE)
    return list(reward.score(RewardBatch(images, [Prompt(i, text, "s") for i, text in enumerate(PROMPTS)])))


def test_hpsv2_is_open_clips_cosine(checkpoint: Path, processor: Path) -> None:
    images = pictures(16, 16)
    expected = cosines(images)
    assert np.std(expected) > 0.01
    assert scores(checkpoint, processor, images) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("height", "width"), [(64, 32), (21, 64), (16, 7)])
def test_hpsv2_shows_all_of_a_picture_that_is_not_square(
    height: int, width: int, checkpoint: Path, processor: Path
) -> None:
    """Its own transform: the longer side becomes 16 pixels, black is put evenly around the shorter one."""
    images = pictures(height, width)
    high, wide = round(16 * height / max(height, width)), round(16 * width / max(height, width))
    squares = []
    for image in images:
        small = np.asarray(Image.fromarray(image).resize((wide, high), Image.Resampling.BICUBIC))
        above, before = (16 - high) // 2, (16 - wide) // 2
        squares.append(np.pad(small, ((above, 16 - high - above), (before, 16 - wide - before), (0, 0))))
    assert scores(checkpoint, processor, images) == pytest.approx(cosines(np.stack(squares)), abs=1e-5)


def test_a_score_does_not_depend_on_the_padding_token(checkpoint: Path, processor: Path, tmp_path: Path) -> None:
    images = pictures(16, 16)
    other = scores(checkpoint, write_processor(tmp_path, padding="!"), images)
    assert other == pytest.approx(scores(checkpoint, processor, images), abs=1e-6)


def test_a_tokenizer_of_another_model_is_refused(checkpoint: Path, processor: Path, tmp_path: Path) -> None:
    """With it, every text would be pooled at its first token."""
    moved = {token: number for number, token in enumerate(reversed(VOCABULARY))}
    CLIPTokenizer(vocab=moved, merges=[]).save_pretrained(tmp_path)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"processor: the tokenizer of .* ends texts with number 0, .*expects 54"):
        scores(checkpoint, tmp_path, pictures(16, 16))


def test_an_image_processor_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"processor: the image processor of .* pictures 20 high, the model takes 16"):
        scores(checkpoint, write_processor(tmp_path, side=20), pictures(16, 16))
