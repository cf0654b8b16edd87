"""Prompts that are longer than what the model reads of them: the rest is cut off without a word.

Of several text encoders the one that reads most counts (`model.text_length`): T5 for Stable Diffusion 3 and FLUX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marble_rl.config import RunConfig
from marble_rl.mini import PIPELINE, embedded
from marble_rl.models import adapter_of


@dataclass(frozen=True)
class Reader:
    """How a model reads prompts."""

    limit: int
    """Tokens"""
    lengths: Callable[[Sequence[str]], list[int]]
    """Tokens of each text"""

    def too_long(self, texts: Sequence[str]) -> int:
        return sum(length > self.limit for length in self.lengths(texts))


def reader_of(config: RunConfig) -> Reader | None:
    """From the tokenizer's files; None where they cannot be read, or are neither in a folder nor in the hub's cache."""
    folder = _folder(config.model.path)
    if folder is None:
        return None
    family = adapter_of(folder / "model_index.json")
    names = dict.fromkeys([family.text_tokenizer, "tokenizer"])  # a pipeline may come without T5
    tokenizer = next((folder / name for name in names if (folder / name / "tokenizer_config.json").exists()), None)
    if tokenizer is None:
        return None
    try:
        built_for = json.loads((tokenizer / "tokenizer_config.json").read_text()).get("model_max_length", 1 << 30)
        return Reader(config.model.text_length or min(family.default_text, int(built_for)), _lengths(tokenizer))
    except Exception:  # of many libraries; loading the model will say what is wrong
        return None


def _folder(path: str) -> Path | None:
    folder = Path(embedded(path, PIPELINE))
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(path, "model_index.json")
    return Path(index).parent if isinstance(index, str) else None


def _lengths(folder: Path) -> Callable[[Sequence[str]], list[int]]:
    fast = folder / "tokenizer.json"
    if fast.exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(fast))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return lambda texts: [len(one.ids) for one in tokenizer.encode_batch(list(texts))]
    from transformers import AutoTokenizer  # slow to import; some models have only files for it

    slow = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    return lambda texts: [len(ids) for ids in slow(list(texts)).input_ids]
