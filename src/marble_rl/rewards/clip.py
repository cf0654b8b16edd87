"""Rewards made of a CLIP model: how near a picture's embedding is to its prompt's.

`clipscore`, `pickscore` and `hpsv2` differ only in what the model was trained on, and in the unit of the score.
`aesthetic` looks at the picture alone.

Each reads a `CLIPModel` in transformers' format, with its tokenizer and image processor: a hub id, a folder, or
`mini` for the small one that the package carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from marble_rl.errors import InputError
from marble_rl.mini import MINI, embedded
from marble_rl.rewards.base import Images, RewardBase, RewardBatch


class ClipEmbedder:
    """A CLIP model with its processor: pictures and texts to unit vectors."""

    def __init__(self, path: str, device: torch.device, processor: str | None = None) -> None:
        from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

        self.device = device
        self.model = CLIPModel.from_pretrained(path, dtype=torch.float32).to(device).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(processor or path)
        self.image_processor = CLIPImageProcessor.from_pretrained(processor or path)

    @torch.no_grad()
    def images(self, images: Images | Sequence[Image.Image]) -> Tensor:
        """[B, H, W, 3] uint8, or B pictures of any sizes -> [B, D]"""
        pixels = self.image_processor(images=list(images), return_tensors="pt")["pixel_values"].to(self.device)
        return F.normalize(self.model.visual_projection(self.model.vision_model(pixels).pooler_output), dim=-1)

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """[B, D]"""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        return F.normalize(self.model.text_projection(self.model.text_model(**tokens).pooler_output), dim=-1)


class _ClipSimilarity(RewardBase):
    """Cosine between picture and prompt, times a unit."""

    name: str
    default: str = ""
    """Hub id of the published weights, where transformers can read them."""
    processor: str | None = None
    """Hub id of the tokenizer and image processor, where the published weights come without."""

    def __init__(self, model: str | None = None) -> None:
        self.model = model or self.default
        self._clip: Any = None

    def load(self, device: torch.device) -> None:
        published = self.model == self.default
        self._clip = ClipEmbedder(embedded(self.model, self.name), device, self.processor if published else None)

    def unit(self) -> float:
        return 1.0

    def score(self, batch: RewardBatch) -> Sequence[float]:
        texts = [prompt.text for prompt in batch.prompts]
        different = list(dict.fromkeys(texts))
        embedded_texts = self._clip.texts(different)[[different.index(text) for text in texts]]
        cosines = (self._clip.images(batch.images) * embedded_texts).sum(-1)
        return [float(score) for score in cosines * self.unit()]


class ClipScore(_ClipSimilarity):
    """How well the picture matches its prompt: the cosine of CLIP's embeddings."""

    name = "clipscore"
    default = "openai/clip-vit-large-patch14"


class PickScore(_ClipSimilarity):
    """Which picture people would pick for the prompt: CLIP tuned on choices, cosine times its logit scale."""

    name = "pickscore"
    default = "yuvalkirstain/PickScore_v1"
    processor = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def unit(self) -> float:
        return float(self._clip.model.logit_scale.exp())


class Hpsv2(_ClipSimilarity):
    """How good people would find the picture for the prompt: CLIP tuned on rankings, cosine."""

    name = "hpsv2"

    def __init__(self, model: str) -> None:
        super().__init__(model)


class Aesthetic(RewardBase):
    """How pleasing the picture is, whatever the prompt: a small network on CLIP's embedding of it.

    ``head`` holds that network's weights, laid out as in LAION's improved predictor (``layers.N.weight`` and
    ``.bias``, linear all through), as safetensors or as a .pth of tensors.
    """

    def __init__(self, model: str = ClipScore.default, head: str | None = None) -> None:
        if head is None and model != MINI:
            raise InputError(
                "head: is missing; give the file with the predictor's weights, for "
                f"{ClipScore.default} that is sac+logos+ava1-l14-linearMSE.pth of LAION's improved-aesthetic-predictor"
            )
        self.model = model
        self.head = head
        self._clip: Any = None
        self._layers: list[tuple[Tensor, Tensor]] = []

    def load(self, device: torch.device) -> None:
        folder = embedded(self.model, "aesthetic")
        self._clip = ClipEmbedder(folder, device)
        self._layers = _read_layers(Path(self.head or Path(folder) / "head.safetensors"), device)

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> Sequence[float]:
        states = self._clip.images(batch.images)
        for weight, bias in self._layers:
            states = F.linear(states, weight, bias)
        return [float(score) for score in states[:, 0]]


def _read_layers(file: Path, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each linear layer, in the order of their numbers."""
    stored = (
        load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
    )
    names = sorted((name for name in stored if name.endswith(".weight")), key=lambda name: int(name.split(".")[-2]))
    return [
        (stored[name].float().to(device), stored[name.removesuffix("weight") + "bias"].float().to(device))
        for name in names
    ]
