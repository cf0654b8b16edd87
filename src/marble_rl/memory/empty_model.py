"""A pipeline built from its configs on torch's meta device: the right shapes, no weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from marble_rl import hub
from marble_rl.config import RunConfig
from marble_rl.mini import PIPELINE, embedded
from marble_rl.models import adapter_of, check_model_path
from marble_rl.models.base import DiffusionModel


def config_folder(path: str) -> Path:
    """The folder with a pipeline's configs. Those of a pipeline on the hub are downloaded, its weights are not."""
    folder = Path(embedded(path, PIPELINE))
    if folder.is_dir():
        return folder
    check_model_path(path)
    with hub.explained("model.path", path, "the pipeline's model_index.json"):
        from huggingface_hub import snapshot_download

        download = partial(snapshot_download, path, allow_patterns=["*.json"], ignore_patterns=["*.index.json"])
        try:
            hub.check_reachable()
        except ConnectionError:
            return Path(download(local_files_only=True))
        return Path(download())


def build_empty(config: RunConfig, folder: Path) -> DiffusionModel:
    """The pipeline that the configs in ``folder`` describe, without weights or tokenizers."""
    with hub.explained("model.path", str(folder), "the configs of a pipeline in diffusers' format"):
        return _built(config, folder)


def _built(config: RunConfig, folder: Path) -> DiffusionModel:
    import diffusers
    import transformers

    adapter = adapter_of(folder / "model_index.json")
    parts: dict[str, Any] = {}
    for name, entry in json.loads((folder / "model_index.json").read_text()).items():
        if name.startswith("_"):
            continue
        if not isinstance(entry, list):  # a setting of the pipeline, such as Wan's boundary_ratio
            parts[name] = entry
            continue
        library, kind = entry
        if kind is None or "token" in name:
            parts[name] = None
        elif library == "diffusers":
            cls = getattr(diffusers, kind)
            with torch.device("cpu" if name == "scheduler" else "meta"):
                parts[name] = cls.from_config(cls.load_config(str(folder), subfolder=name))
        else:
            cls = getattr(transformers, kind)
            with torch.device("meta"):
                parts[name] = cls(cls.config_class.from_pretrained(str(folder / name)))
            parts[name].tie_weights()
    text_length = config.model.text_length or min(adapter.default_text, _tokens(folder / adapter.text_tokenizer))
    pipeline = adapter.diffusers_class()(**parts)
    if hasattr(pipeline, "tokenizer_max_length"):
        pipeline.tokenizer_max_length = min(pipeline.tokenizer_max_length, _tokens(folder / "tokenizer"))
    return adapter(pipeline, torch.device("meta"), text_length, config.model.guidance)


def _tokens(tokenizer: Path) -> int:
    """The longest prompt that a tokenizer was built for, in tokens; a very large number if its config does not say."""
    settings = tokenizer / "tokenizer_config.json"
    return int(json.loads(settings.read_text()).get("model_max_length", 1 << 30)) if settings.exists() else 1 << 30
