"""ImageReward: how good people would find the picture for its prompt, judged by a BLIP that reads the two together.

    picture  -> ViT -> one state per patch
    prompt   -> BERT whose layers also attend to those states -> state of [CLS]
    score    =  (head([CLS]) - MEAN) / STD, the head being linear all through

Computes what ImageReward-v1.0 computes (https://github.com/THUDM/ImageReward), from its checkpoint as published, on
transformers' BLIP. Two things are easy to get wrong, because transformers' defaults differ: the ViT's LayerNorm has
epsilon 1e-6, and the text encoder is as med_config.json says, but for `encoder_width`, which is the ViT's width.
The prompt begins with [CLS], not with BLIP's [ENC].
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from marble_rl import hub
from marble_rl.errors import InputError
from marble_rl.rewards.builtin.tensors import check_accounted, count_blocks, read_tensors, renamed, shape_of
from marble_rl.rewards.core.base import Images, RewardBase, RewardBatch, Traits
from marble_rl.section import ModelPath, Section

PUBLISHED = "zai-org/ImageReward"
CHECKPOINT = "ImageReward.pt"
TEXT_CONFIG = "med_config.json"
ADVICE = f"give {CHECKPOINT} and {TEXT_CONFIG} as published at https://huggingface.co/{PUBLISHED}"
TOKENIZER = "bert-base-uncased"
"""The published folder comes without a tokenizer."""
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json")
ADDED_TOKENS = ("[DEC]", "[ENC]")
"""BLIP's, behind BERT's own. A prompt holds them only if it spells them out."""

TEXT_LENGTH = 35
"""Tokens that are read of a prompt, [CLS] and [SEP] among them."""
MEAN, STD = 0.16717362830052426, 1.0333394966054072
PIXEL_MEAN, PIXEL_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

ATTENTION_HEAD_WIDTH = 64
"""Of BLIP's ViTs, base and large; the checkpoint does not say."""
VISION_EPSILON = 1e-6
HEAD_PLACES = (0, 2, 4, 6, 7)
"""Linear layers of the head by their place; at the others was dropout."""
TEXT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)
NAMES = (
    (r"^text\.", "blip.text_encoder."),
    (r"^head\.", "mlp.layers."),
    (r"^vision\.embeddings\.class_embedding$", "blip.visual_encoder.cls_token"),
    (r"^vision\.embeddings\.position_embedding$", "blip.visual_encoder.pos_embed"),
    (r"^vision\.embeddings\.patch_embedding\.", "blip.visual_encoder.patch_embed.proj."),
    (r"^vision\.post_layernorm\.", "blip.visual_encoder.norm."),
    (r"^vision\.encoder\.layers\.(\d+)\.self_attn\.qkv\.", r"blip.visual_encoder.blocks.\1.attn.qkv."),
    (r"^vision\.encoder\.layers\.(\d+)\.self_attn\.projection\.", r"blip.visual_encoder.blocks.\1.attn.proj."),
    (r"^vision\.encoder\.layers\.(\d+)\.layer_norm([12])\.", r"blip.visual_encoder.blocks.\1.norm\2."),
    (r"^vision\.encoder\.layers\.(\d+)\.mlp\.", r"blip.visual_encoder.blocks.\1.mlp."),
)
"""Our names of tensors, as patterns for `renamed`, and what the checkpoint calls them."""
UNUSED = ("blip.text_encoder.embeddings.position_ids", "blip.vision_proj.", "blip.text_proj.")
"""How names of tensors begin that no score depends on: the positions 0, 1, 2, ..., and the projections that served
BLIP's contrastive loss."""


class ImageReward(RewardBase):
    """How good people would find the picture for the prompt: BLIP tuned on expert rankings, standardised."""

    class Params(Section):
        model: ModelPath = PUBLISHED
        """Hub id, a folder with ImageReward.pt and med_config.json, or such a .pt beside its med_config.json. A
        vocab.txt in the same folder is used for the tokenizer, else that of bert-base-uncased."""

    params: Params
    traits = Traits(deterministic=True)
    _network: Network
    _tokenizer: Any
    _device: torch.device

    def load(self, device: torch.device) -> None:
        text_config, checkpoint = _locate(self.params.model)
        network = read_network(checkpoint, text_config)
        self._tokenizer = _read_tokenizer(checkpoint.parent, network.vocabulary)
        self._network = network.to(device)
        self._device = device

    @torch.no_grad()
    def score(self, batch: RewardBatch) -> Sequence[float]:
        pixels = to_pixels(batch.images, self._network.image_size).to(self._device)
        tokens = self._tokenizer(
            [prompt.text for prompt in batch.prompts],
            padding="max_length",
            truncation=True,
            max_length=TEXT_LENGTH,
            return_tensors="pt",
        ).to(self._device)
        raw = self._network(pixels, tokens["input_ids"], tokens["attention_mask"])
        return [float(score) for score in (raw - MEAN) / STD]


class Network(nn.Module):
    """The ViT, the text encoder that attends to it, and the head. Built without values on the meta device."""

    def __init__(self, vision: Any, text: Any, head: Iterable[Sequence[int]]) -> None:
        """``vision`` and ``text`` are transformers' configs, ``head`` the shapes of its weights."""
        super().__init__()
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        self.image_size = int(vision.image_size)
        self.vocabulary = int(text.vocab_size)
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        layers = (nn.Linear(wide, narrow) for narrow, wide in head)
        self.head = nn.Sequential(OrderedDict(zip(map(str, HEAD_PLACES), layers, strict=True)))

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Raw rewards [B] of pixels [B, 3, S, S] for tokens [B, T], where mask [B, T] is 0 on padding."""
        seen = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(input_ids=tokens, attention_mask=mask, encoder_hidden_states=seen).last_hidden_state
        raw: Tensor = self.head(read[:, 0])[:, 0]
        return raw


def to_pixels(images: Images, size: int) -> Tensor:
    """[B, H, W, 3] uint8 -> [B, 3, size, size], normalised.

    Through pillow, as ImageReward does it; resizing tensors gives slightly different pixels.
    """
    squares = np.stack([np.asarray(_square(Image.fromarray(image), size)) for image in images])
    shares = torch.from_numpy(squares).permute(0, 3, 1, 2).float() / 255
    return (shares - torch.tensor(PIXEL_MEAN).view(3, 1, 1)) / torch.tensor(PIXEL_STD).view(3, 1, 1)


def _square(image: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to ``size``, the middle of the longer one cut out; rounding as torchvision's."""
    short, long = sorted(image.size)
    longer = int(size * long / short)
    width, height = (size, longer) if image.width <= image.height else (longer, size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + size, top + size))


def read_network(checkpoint: Path, text_config: Path) -> Network:
    """The network with the checkpoint's weights, in float32 on the CPU."""
    text_fields = _read_text_fields(text_config)
    stored = read_tensors(checkpoint, "model", ADVICE)
    try:
        network = empty_network(stored, text_fields)
        network.load_state_dict(_matched(stored, network), assign=True)
    except InputError as error:
        raise InputError(f"model: {checkpoint}: {error}; {ADVICE}") from None
    # The one buffer that transformers keeps out of its state dict still has no values.
    positions = network.text.embeddings.position_ids.shape[-1]
    network.text.embeddings.position_ids = torch.arange(positions)[None]
    return network.eval().requires_grad_(False)


def empty_network(stored: Mapping[str, Tensor], text_fields: Mapping[str, Any]) -> Network:
    """The network for these tensors, on the meta device: nothing is drawn at random only to be overwritten."""
    from transformers import BlipTextConfig, BlipVisionConfig

    sizes = _vision_sizes(stored)
    vision = BlipVisionConfig(**sizes, hidden_act="gelu", layer_norm_eps=VISION_EPSILON)
    text = BlipTextConfig(
        **text_fields,
        encoder_hidden_size=sizes["hidden_size"],
        is_decoder=True,  # transformers' word for "has cross-attention"; nothing is causal unless asked for
        attn_implementation="eager",
    )
    head = [shape_of(stored, f"mlp.layers.{place}.weight", 2) for place in HEAD_PLACES]
    with torch.device("meta"):
        return Network(vision, text, head)


def _vision_sizes(stored: Mapping[str, Tensor]) -> dict[str, int]:
    """The ViT's sizes from the shapes of its tensors."""
    prefix = "blip.visual_encoder."
    _, positions, width = shape_of(stored, f"{prefix}pos_embed", 3)
    patch = shape_of(stored, f"{prefix}patch_embed.proj.weight", 4)[-1]
    if width % ATTENTION_HEAD_WIDTH:
        raise InputError(f"{prefix}pos_embed is {width} wide, which is no multiple of {ATTENTION_HEAD_WIDTH}")
    return {
        "hidden_size": width,
        "intermediate_size": shape_of(stored, f"{prefix}blocks.0.mlp.fc1.weight", 2)[0],
        "num_hidden_layers": count_blocks(stored, f"{prefix}blocks."),
        "num_attention_heads": width // ATTENTION_HEAD_WIDTH,
        "patch_size": patch,
        "image_size": math.isqrt(positions - 1) * patch,
    }


def _matched(stored: Mapping[str, Tensor], network: Network) -> dict[str, Tensor]:
    """The checkpoint's tensors under the network's names. Every tensor on either side must be accounted for."""
    ours = {renamed(name, NAMES): name for name in network.state_dict()}
    shapes = {theirs: network.state_dict()[name].shape for theirs, name in ours.items()}
    check_accounted(stored, shapes, unused=[name for name in stored if name.startswith(UNUSED)])
    return {name: stored[theirs] for theirs, name in ours.items()}


def _read_text_fields(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text())
        return {name: fields[name] for name in TEXT_FIELDS}
    except KeyError as error:
        raise InputError(f"model: {file} has no {error}; {ADVICE}") from None
    except (ValueError, TypeError) as error:
        raise InputError(f"model: {file} is not a JSON object ({error}); {ADVICE}") from None


def _read_tokenizer(folder: Path, vocabulary: int) -> Any:
    from transformers import BertTokenizer

    own = any((folder / name).is_file() for name in TOKENIZER_FILES)
    source = str(folder) if own else TOKENIZER
    with hub.explained("model", source, "the tokenizer", f"or put the vocab.txt of {TOKENIZER} into {folder}"):
        tokenizer = BertTokenizer.from_pretrained(source)
    tokenizer.add_tokens(list(ADDED_TOKENS), special_tokens=True)
    if len(tokenizer) != vocabulary:
        raise InputError(
            f"model: the tokenizer {source} has {len(tokenizer)} tokens with {' and '.join(ADDED_TOKENS)}, "
            f"{TEXT_CONFIG} says {vocabulary}; put the vocab.txt of {TOKENIZER} into {folder}"
        )
    return tokenizer


def _locate(model: str) -> tuple[Path, Path]:
    """med_config.json and the checkpoint; in this order, so that a wrong hub id is reported before a long download."""
    path = Path(model).expanduser()
    if path.is_dir():
        files = path / TEXT_CONFIG, path / CHECKPOINT
    elif path.is_file():
        files = path.parent / TEXT_CONFIG, path
    elif hub.looks_local(model):
        raise InputError(f"model: no such folder or file: {model}; {ADVICE}, or a hub id owner/name")
    else:
        text_config = hub.download("model", model, TEXT_CONFIG, ADVICE)
        return text_config, hub.download("model", model, CHECKPOINT, ADVICE)
    for file in files:
        if not file.is_file():
            raise InputError(f"model: {file} is missing; {ADVICE}")
    return files
