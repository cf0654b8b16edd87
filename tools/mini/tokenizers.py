"""Tokenizers for the mini world: one token for every word of its captions, letters for the text on signs."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from marble_rl.mini.shapes import SHAPES
from tools.mini.scenes import COLOURS, LIGHTS, NUMBERS, PLACES, RELATIONS

PUNCTUATION = '",.'
START, END = "<|startoftext|>", "<|endoftext|>"


def words() -> list[str]:
    """Every word that a caption can hold, in a fixed order."""
    phrases = ["a and sign that says", *COLOURS, *SHAPES, *NUMBERS.values(), *RELATIONS, *PLACES, *LIGHTS]
    phrases += [f"{shape}s" for shape in SHAPES]
    return list(dict.fromkeys(word for phrase in phrases for word in phrase.split()))


def clip_tokenizer(length: int) -> Any:
    """A `CLIPTokenizer` (which lower-cases) with a BPE merge path to each word."""
    from transformers import CLIPTokenizer

    symbols = [*string.ascii_lowercase, *string.digits, *PUNCTUATION]
    merges = _merges()
    merged = [left + right for left, right in merges]
    vocab = [START, END, *symbols, *(f"{symbol}</w>" for symbol in symbols), *merged]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(dict.fromkeys(vocab))},
        merges=merges,
        model_max_length=length,
    )


def token_ids(tokenizer: Any, captions: Sequence[str], length: int) -> Tensor:
    """[B, length], padded or cut."""
    encoded = tokenizer(list(captions), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids: Tensor = encoded.input_ids
    return ids


def _merges() -> list[tuple[str, str]]:
    """BPE merges that make one token of each word: apply the merges so far, then add those that join the rest."""
    merges: list[tuple[str, str]] = []
    for word in words():
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        for left, right in merges:
            i = 0
            while i < len(pieces) - 1:
                if (pieces[i], pieces[i + 1]) == (left, right):
                    pieces[i : i + 2] = [left + right]
                else:
                    i += 1
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces[:2] = [pieces[0] + pieces[1]]
    return merges


def t5_tokenizer(length: int, vocabulary: Sequence[str] | None = None) -> Any:
    """A `T5Tokenizer` (which keeps capitals) that prefers whole words, those of the mini world or others."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    letters = [*string.ascii_letters, *string.digits, *PUNCTUATION]
    pieces = [*((f"▁{word}", -1.0) for word in vocabulary or words()), *((letter, -4.0) for letter in letters)]
    return T5Tokenizer(vocab=[*special, *pieces], extra_ids=0, model_max_length=length)
