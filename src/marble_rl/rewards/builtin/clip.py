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
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import BeforeValidator, Field, PositiveFloat, ValidationInfo, field_validator
from torch import Tensor

from marble_rl import hub
from marble_rl.errors import InputError
from marble_rl.mini import embedded
from marble_rl.rewards.builtin import openclip
from marble_rl.rewards.builtin.embedder import ClipEmbedder, read_model
from marble_rl.rewards.builtin.tensors import check_accounted, read_tensors, shape_of
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Traits
from marble_rl.section import MINI, FilePath, ModelPath, Section

OPENAI_L = "openai/clip-vit-large-patch14"
LAION_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
"""The model that PickScore and HPSv2 were tuned from. They use its tokenizer and image processor."""
HPS_FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
COSINE = (-1.001, 1.001)
"""The cosine's range, with room for rounding."""


class ClipParams(Section):
    """What all rewards made of CLIP take."""

    model: ModelPath = OPENAI_L
    """Hub id or folder of a `CLIPModel` in transformers' format, or `mini`."""
    processor: ModelPath | None = None
    """Hub id or folder of the tokenizer and image processor; null: where the model is."""


class _ClipSimilarity(RewardBase):
    """Cosine between picture and prompt, times a unit."""

    Params: type[ClipParams] = ClipParams
    name: str
    published_processor: str | None = None
    """Hub id of the tokenizer and image processor, where those of the published weights are elsewhere."""
    _clip: ClipEmbedder

    def load(self, device: torch.device) -> None:
        processor = self.params.processor or (None if self.brings_processor() else self.published_processor)
        self._clip = ClipEmbedder(embedded(self.params.model, self.name), device, processor, read=self.read_model)

    def read_model(self, path: str, key: str) -> Any:
        return read_model(path, key)

    def brings_processor(self) -> bool:
        """Whether tokenizer and image processor are where the model is."""
        return bool(self.params.model != self.Params.model_fields["model"].default)

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
    traits = Traits(range=COSINE, deterministic=True)


class PickScore(_ClipSimilarity):
    """Which picture people would pick for the prompt: CLIP tuned on choices, cosine times its logit scale."""

    class Params(ClipParams):
        model: ModelPath = "yuvalkirstain/PickScore_v1"
        """Hub id or folder of a `CLIPModel` in transformers' format, or `mini`."""
        divide_by: PositiveFloat = 1.0
        """For comparisons with flow_grpo and DiffusionNFT, which log the score divided by 26."""

    name = "pickscore"
    published_processor = LAION_H
    traits = Traits(deterministic=True)  # the range is the checkpoint's logit scale, which is not known before

    def unit(self) -> float:
        return float(self._clip.model.logit_scale.exp()) / float(self.params.divide_by)


def _without_quotes(version: Any) -> Any:
    """YAML reads 2.1 without quotes as a number."""
    return str(version) if isinstance(version, float) else version


class Hpsv2(_ClipSimilarity):
    """How good people would find the picture for the prompt: CLIP tuned on rankings, cosine."""

    class Params(ClipParams):
        model: ModelPath = "xswu/HPSv2"
        """Hub id or folder of a `CLIPModel` in transformers' format, a checkpoint file of open_clip, or `mini`."""
        version: Annotated[Literal["2.0", "2.1"], BeforeValidator(_without_quotes)] = "2.1"
        """Of the published weights. Scores of the two cannot be compared."""

        @field_validator("version")
        @classmethod
        def _published_only(cls, version: str, info: ValidationInfo) -> str:
            if info.data.get("model") != cls.model_fields["model"].default:
                raise ValueError(f"{version!r} is for the published weights; leave it out, or leave out `model`")
            return version

    name = "hpsv2"
    published_processor = LAION_H
    traits = Traits(range=COSINE, deterministic=True)

    def read_model(self, path: str, key: str) -> Any:
        if path == self.Params.model_fields["model"].default:
            return openclip.read_model(hub.download(key, path, HPS_FILES[self.params.version]), key)
        file = Path(path).expanduser()
        return openclip.read_model(file, key) if file.is_file() else read_model(path, key)

    def brings_processor(self) -> bool:
        return super().brings_processor() and not Path(self.params.model).expanduser().is_file()

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
    """How pleasing the picture is, whatever the prompt: a small network on CLIP's embedding of it."""

    class Params(ClipParams):
        head: FilePath | None = Field(None, validate_default=True)
        """File with the network's weights, laid out as in LAION's improved predictor (`layers.N.weight` and `.bias`,
        linear all through), as .safetensors or as a .pth of tensors. Required, except for `model: mini`."""

        @field_validator("head")
        @classmethod
        def _given(cls, head: Path | None, info: ValidationInfo) -> Path | None:
            if head is None and info.data.get("model") != MINI:
                raise ValueError(f"is missing; {HEAD_ADVICE}")
            return head

    params: Params
    traits = Traits(deterministic=True)
    _clip: ClipEmbedder
    _layers: list[tuple[Tensor, Tensor]]

    def load(self, device: torch.device) -> None:
        folder = embedded(self.params.model, "aesthetic")
        head = (self.params.head or Path(folder) / "head.safetensors").expanduser()
        self._clip = ClipEmbedder(folder, device, self.params.processor)
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
    f"{OPENAI_L} that is sac+logos+ava1-l14-linearMSE.pth of LAION's improved-aesthetic-predictor"
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
