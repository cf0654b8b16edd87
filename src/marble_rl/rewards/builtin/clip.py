"""Rewards made of a CLIP model: how near a picture's embedding is to its prompt's.

    cosine = <image, text>, both embeddings being unit vectors

`clipscore`, `pickscore` and `hpsv2` differ in what the model was trained on, and in the unit of the score.
`aesthetic` looks at the picture alone.

Each reads a `CLIPModel` in transformers' format, with its tokenizer and image processor: a hub id, a folder, or
`mini` for the small one that the package carries. `hpsv2` reads checkpoints of open_clip as well, as it is published.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from marble_rl import hub
from marble_rl.errors import InputError
from marble_rl.mini import MINI, embedded
from marble_rl.rewards.builtin import openclip
from marble_rl.rewards.builtin.embedder import ClipEmbedder, read_model
from marble_rl.rewards.builtin.tensors import check_accounted, read_tensors, shape_of
from marble_rl.rewards.core import checks
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Traits

LAION_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""What PickScore and HPSv2 were tuned from; its tokenizer and image processor go with them."""
HPS_FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
COSINE = (-1.001, 1.001)
"""The cosine's range, with room for rounding."""


class _ClipSimilarity(RewardBase):
    """Cosine between picture and prompt, times a unit."""

    name: str
    default: str
    """Hub id of the published weights."""
    published_processor: str | None = None
    """Hub id of the tokenizer and image processor, where those of the published weights are elsewhere."""

    def __init__(self, model: str | None = None, processor: str | None = None) -> None:
        self.model = model or self.default
        self.processor = processor
        self._clip: Any = None

    def load(self, device: torch.device) -> None:
        processor = self.processor or (None if self.brings_processor() else self.published_processor)
        self._clip = ClipEmbedder(embedded(self.model, self.name), device, processor, read=self.read_model)

    def read_model(self, path: str, key: str) -> Any:
        return read_model(path, key)

    def brings_processor(self) -> bool:
        """Whether tokenizer and image processor are where the model is."""
        return self.model != self.default

    def shown(self, images: Images) -> Images:
        """The pictures as the image processor gets them."""
        return images

    def unit(self) -> float:
        return 1.0

    def score(self, batch: RewardBatch) -> Sequence[float]:
        texts = [prompt.text for prompt in batch.prompts]
        different = list(dict.fromkeys(texts))
        embedded_texts = self._clip.texts(different)[[different.index(text) for text in texts]]
        cosines = (self._clip.images(self.shown(batch.images)) * embedded_texts).sum(-1)
        return [float(score) for score in cosines * self.unit()]


class ClipScore(_ClipSimilarity):
    """How well the picture matches its prompt: the cosine of CLIP's embeddings."""

    name = "clipscore"
    default = "openai/clip-vit-large-patch14"
    traits = Traits(range=COSINE, deterministic=True)


class PickScore(_ClipSimilarity):
    """Which picture people would pick for the prompt: CLIP tuned on choices, cosine times its logit scale.

    ``divide_by`` is for comparisons with flow_grpo and DiffusionNFT, which log the score divided by 26.
    """

    name = "pickscore"
    default = "yuvalkirstain/PickScore_v1"
    published_processor = LAION_H
    traits = Traits(deterministic=True)  # the range is the checkpoint's logit scale, which is not known before

    def __init__(self, model: str | None = None, processor: str | None = None, divide_by: float = 1.0) -> None:
        super().__init__(model, processor)
        self.divide_by = checks.number("divide_by", divide_by, "a number above 0, such as 26", positive=True)

    def unit(self) -> float:
        return float(self._clip.model.logit_scale.exp()) / self.divide_by


class Hpsv2(_ClipSimilarity):
    """How good people would find the picture for the prompt: CLIP tuned on rankings, cosine.

    ``version`` is that of the published weights, 2.0 or 2.1. ``model`` may also be the path of an open_clip checkpoint.
    """

    name = "hpsv2"
    default = "xswu/HPSv2"
    published_processor = LAION_H
    traits = Traits(range=COSINE, deterministic=True)

    def __init__(
        self, model: str | None = None, processor: str | None = None, version: str | float | None = None
    ) -> None:
        super().__init__(model, processor)
        if version is not None and self.model != self.default:
            raise InputError(f"version: {version!r} is for the published weights; leave it out, or leave out `model`")
        self.version = str(version or "2.1")  # without quotes, YAML reads a number
        if self.version not in HPS_FILES:
            raise InputError(f"version: unknown {version!r}; use one of {', '.join(HPS_FILES)}")

    def read_model(self, path: str, key: str) -> Any:
        if path == self.default:
            return openclip.read_model(hub.download(key, path, HPS_FILES[self.version]), key)
        file = Path(path).expanduser()
        return openclip.read_model(file, key) if file.is_file() else read_model(path, key)

    def brings_processor(self) -> bool:
        return super().brings_processor() and not Path(self.model).expanduser().is_file()

    def shown(self, images: Images) -> Images:
        return squared(images, self._clip.side)


def squared(images: Images, side: int) -> Images:
    """[B, H, W, 3] -> [B, side, side, 3] where pictures are not square: the longer side resized, the rest black.

    As HPSv2 does it. CLIP's own image processor would cut off what is longer.
    """
    height, width = images.shape[1:3]
    if height == width:
        return images
    size = round(width * side / max(height, width)), round(height * side / max(height, width))
    corner = (side - size[0]) // 2, (side - size[1]) // 2
    result = []
    for image in images:
        square = Image.new("RGB", (side, side))
        square.paste(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC), corner)
        result.append(np.asarray(square))
    return np.stack(result)


class Aesthetic(RewardBase):
    """How pleasing the picture is, whatever the prompt: a small network on CLIP's embedding of it.

    ``head`` holds that network's weights, laid out as in LAION's improved predictor (``layers.N.weight`` and
    ``.bias``, linear all through), as safetensors or as a .pth of tensors.
    """

    traits = Traits(deterministic=True)

    def __init__(self, model: str = ClipScore.default, head: str | None = None, processor: str | None = None) -> None:
        if head is None and model != MINI:
            raise InputError(f"head: is missing; {HEAD_ADVICE}")
        self.model = model
        self.head = head
        self.processor = processor
        self._clip: Any = None
        self._layers: list[tuple[Tensor, Tensor]] = []

    def load(self, device: torch.device) -> None:
        folder = embedded(self.model, "aesthetic")
        head = Path(self.head or Path(folder) / "head.safetensors").expanduser()
        self._clip = ClipEmbedder(folder, device, self.processor)
        width = self._clip.model.config.projection_dim
        self._layers = [(weight.to(device), bias.to(device)) for weight, bias in _read_layers(head, width)]

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> Sequence[float]:
        states = self._clip.images(batch.images)
        # In float32 even under autocast: it costs nothing, and half precision would round 5.47 to 5.5.
        with torch.autocast(states.device.type, enabled=False):
            for weight, bias in self._layers:
                states = F.linear(states, weight, bias)
        return [float(score) for score in states[:, 0]]


HEAD_ADVICE = (
    "give the file with the predictor's weights, for "
    f"{ClipScore.default} that is sac+logos+ava1-l14-linearMSE.pth of LAION's improved-aesthetic-predictor"
)


def _read_layers(file: Path, width: int) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each linear layer, in the order of their numbers; ``width`` is what the first one takes."""
    stored = read_tensors(file, "head", HEAD_ADVICE)
    numbers = sorted(int(match[1]) for name in stored if (match := re.fullmatch(r"layers\.(\d+)\.weight", name)))
    try:
        shapes: dict[str, Sequence[int]] = {}
        for number in numbers:
            narrow = 1 if number == numbers[-1] else shape_of(stored, f"layers.{number}.weight", 2)[0]
            shapes |= {f"layers.{number}.weight": (narrow, width), f"layers.{number}.bias": (narrow,)}
            width = narrow
        check_accounted(stored, shapes or {"layers.0.weight": (1, width)}, unused=())
    except InputError as error:
        raise InputError(f"head: {file}: {error}; {HEAD_ADVICE}") from None
    for before, after in pairwise(numbers):
        if after - before > 2:  # numbers are places in a sequence, and dropout takes one; LAION's ReLU heads skip two
            raise InputError(
                f"head: {file} has more than dropout between layers.{before} and layers.{after}; "
                f"heads with activations are not supported, {HEAD_ADVICE}"
            )
    return [(stored[f"layers.{number}.weight"], stored[f"layers.{number}.bias"]) for number in numbers]
