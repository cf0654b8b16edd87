"""Tiny text encoders with their tokenizers, in which every printable ASCII character is a token."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

LETTERS = [chr(c) for c in range(33, 127)]
TEXT_LENGTH = 24
CLIP_WIDTH, T5_WIDTH, QWEN_WIDTH = 16, 32, 32


def clip(projection: bool = True) -> tuple[Any, Any]:
    """CLIP text encoder, with or without the projection of its pooled output, and its tokenizer."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    vocab = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    tokenizer = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocab)}, merges=[], model_max_length=TEXT_LENGTH
    )
    config = CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=CLIP_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config), tokenizer


def t5(multilingual: bool = False) -> tuple[Any, Any]:
    """T5 or UMT5 encoder and its tokenizer."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer, UMT5Config, UMT5EncoderModel

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    tokenizer = T5Tokenizer(
        vocab=[*special, *((letter, -3.0) for letter in LETTERS)], extra_ids=0, model_max_length=TEXT_LENGTH
    )
    sizes = {"vocab_size": len(tokenizer), "d_model": T5_WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return UMT5EncoderModel(UMT5Config(**sizes)) if multilingual else T5EncoderModel(T5Config(**sizes)), tokenizer


def qwen(template: str) -> tuple[Any, Any]:
    """Qwen2.5-VL and its tokenizer, in which each word of the prompt template is one token, as in the real one."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

    markers = ["<|im_start|>", "<|im_end|>"]
    words = sorted(set(re.findall(r"Ġ?[A-Za-z]+", re.sub(r"<\|\w+\|>", "", template).replace(" ", "Ġ"))))
    merges = list(dict.fromkeys(pair for word in words for pair in _merges(word)))
    vocab = ["<|endoftext|>", *LETTERS, "Ġ", "Ċ", *dict.fromkeys("".join(pair) for pair in merges)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(vocab)},
        merges=merges,
        extra_special_tokens=markers,
        model_max_length=1024,
    )
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": QWEN_WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": QWEN_WIDTH,
            "fullatt_block_indexes": [0],
        },
    )
    return Qwen2_5_VLForConditionalGeneration(config), tokenizer


def _merges(word: str) -> list[tuple[str, str]]:
    """Byte-pair merges that build a word from its first letter on."""
    return [(start, longer[-1]) for start, longer in pairwise(accumulate(word))]
