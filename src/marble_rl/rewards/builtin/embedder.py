"""CLIP as an embedder: pictures and texts to unit vectors of one space, whose products are cosines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from marble_rl import hub
from marble_rl.errors import InputError
from marble_rl.rewards.core.base import Images

WANTED = "a CLIP model with its tokenizer and image processor in transformers' format"
LEGACY_END = 2
"""Older configs have this as the number of the end token. transformers then takes the highest number for it."""


def image_processor() -> Any:
    """CLIP's, in the variant on Pillow.

    Where torchvision is installed, the plain name is a variant on it. That one resizes a little differently, and scores
    must not depend on what else is on a machine.
    """
    import transformers

    # Older versions have the one on Pillow under the plain name.
    return getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor


def on_pillow() -> dict[str, Any]:
    """The same choice as an argument of `AutoImageProcessor.from_pretrained`; its name changed with the classes'."""
    import transformers

    return {"backend": "pil"} if getattr(transformers, "CLIPImageProcessorPil", None) else {"use_fast": False}


def read_model(path: str, key: str) -> Any:
    """A `CLIPModel` in transformers' format, in float32."""
    from transformers import CLIPModel

    source = str(Path(path).expanduser())
    with hub.explained(key, path, WANTED):
        # Tensors that are missing or of another shape are drawn at random, unless the report is checked.
        model, report = CLIPModel.from_pretrained(
            source, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, weights_only=True
        )
    if wrong := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise InputError(
            f"{key}: {path} is not the CLIP model that its config.json says: tensors are missing or of "
            f"another shape ({len(wrong)}), such as {wrong[0]}"
        )
    return model


class ClipEmbedder:
    """A CLIP model with its processor.

    ``processor`` is where its tokenizer and image processor are, if not with the model; ``key`` is what the config
    calls the model, and ``read`` reads it.
    """

    def __init__(
        self,
        path: str,
        device: torch.device,
        processor: str | None = None,
        key: str = "model",
        read: Callable[[str, str], Any] = read_model,
    ) -> None:
        from transformers import AutoTokenizer

        self.device = device
        source = processor or path
        # Before the model, so that a mistake is reported before a long download. The tokenizer goes first because
        # its errors say what is wrong; those of the image processor do not.
        with hub.explained("processor" if processor else key, source, WANTED):
            local = str(Path(source).expanduser())
            self.tokenizer = AutoTokenizer.from_pretrained(local, trust_remote_code=False)
            self.image_processor = image_processor().from_pretrained(local)
        self.model = read(path, key).to(device).eval().requires_grad_(False)
        self.side: int = self.model.config.vision_config.image_size
        self._check_processor(source)

    @torch.no_grad()
    def images(self, images: Images | Sequence[Image.Image]) -> Tensor:
        """[B, H, W, 3] uint8, or B pictures of any sizes -> [B, D]"""
        pixels = self.image_processor(images=list(images), return_tensors="pt")["pixel_values"].to(self.device)
        return unit_vectors(self.model.visual_projection(self.model.vision_model(pixels).pooler_output))

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """[B, D]. Always of full length: attention is causal, so padding behind the end token changes nothing."""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        return unit_vectors(self.model.text_projection(self.model.text_model(**tokens).pooler_output))

    def _check_processor(self, source: str) -> None:
        """A text without the end token that the model looks for would be pooled at its start: all texts alike."""
        config = self.model.config.text_config
        end, known = self.tokenizer.eos_token_id, len(self.tokenizer)
        expected = known - 1 if config.eos_token_id == LEGACY_END else config.eos_token_id
        if end != expected or known > config.vocab_size:
            raise InputError(
                f"processor: the tokenizer of {source} has {known} tokens and ends texts with number {end}, the model "
                f"knows {config.vocab_size} and expects {expected}; give the tokenizer that the model was trained with"
            )
        cut = self.image_processor.crop_size if self.image_processor.do_center_crop else None
        if cut and cut["height"] != self.side:
            raise InputError(
                f"processor: the image processor of {source} makes pictures {cut['height']} high, the model takes "
                f"{self.side}; give the image processor that the model was trained with"
            )


def unit_vectors(embeddings: Tensor) -> Tensor:
    """In float32 even under autocast: half precision would leave two or three digits of a cosine."""
    return F.normalize(embeddings.float(), dim=-1)
