"""`marble export`: a LoRA, or a merged pipeline that plain diffusers opens, with a model card for the hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from marble_rl.config import to_yaml
from marble_rl.inference.lora_note import NOTE, LoraNote
from marble_rl.inference.model_card import ExportKind, model_card, read_evaluation
from marble_rl.inference.opening import Opened
from marble_rl.models.lora import Adapter
from marble_rl.models.lora_formats import LoraFormat
from marble_rl.runs.folder import RunFolder
from marble_rl.runs.history import History
from marble_rl.runs.scores import GRID
from marble_rl.storage import storage_errors, write_bytes

CONFIG = "training_config.yaml"
"""Not config.json, which would make the folder look like a run."""


def export_lora(
    opened: Opened, adapter: Adapter, out: Path, run: RunFolder | None = None, layout: LoraFormat = "diffusers"
) -> list[str]:
    """Write a folder with a LoRA. Returns remarks on what the model card leaves out."""
    assert opened.config is not None
    config = opened.config
    note = LoraNote(
        base_model=config.model.path,
        text_length=config.model.text_length,
        guidance=config.model.guidance,
        step=opened.step,
        weights=adapter,
        rewards=list(config.trained_rewards),
        balance=config.balance.type,
    )
    with _all_or_nothing(out):
        opened.model.write_lora(out, adapter, layout)
        note.write(out / NOTE)
        return _describe(opened, adapter, out, run, layout)


def export_merged(opened: Opened, adapter: Adapter, out: Path, run: RunFolder, dtype: torch.dtype) -> list[str]:
    """Write the whole pipeline with the LoRA merged into its weights. ``opened`` has no adapters afterwards."""
    assert opened.policy is not None
    opened.policy.merge(adapter)
    pipeline = opened.model.pipeline
    pipeline.vae.to(memory_format=torch.contiguous_format)  # safetensors needs contiguous tensors
    with _all_or_nothing(out):
        pipeline.to(dtype).save_pretrained(out)
        return _describe(opened, adapter, out, run, "merged")


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[None]:
    """If the export fails, remove what it wrote: an incomplete pipeline would look like a complete one."""
    with storage_errors(str(out), "export again"):
        out.mkdir(parents=True, exist_ok=True)
        before = set(out.iterdir())
        try:
            yield
        except BaseException:
            for entry in set(out.iterdir()) - before:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            raise


def _describe(opened: Opened, adapter: Adapter, out: Path, run: RunFolder | None, kind: ExportKind) -> list[str]:
    """Write the model card, the training config and the image grid. Returns remarks on what is left out."""
    assert opened.config is not None
    evaluation, remarks = (None, []) if run is None else read_evaluation(run, adapter, opened.step)
    picture = None
    grids = [] if run is None or evaluation is None else [run.evaluation / f"{GRID}{end}" for end in (".webp", ".png")]
    # A link may lead to a file that is not to be shown.
    for grid in [grid for grid in grids if grid.is_file() and not grid.is_symlink()][:1]:
        shutil.copyfile(grid, out / grid.name)
        picture = grid.name
    write_bytes(out / CONFIG, to_yaml(opened.config).encode())
    card = model_card(
        opened.model,
        opened.config,
        opened.step,
        adapter,
        evaluation=evaluation,
        picture=picture,
        kind=kind,
        history=History.read(run.history) if run is not None and run.history.exists() else None,
    )
    write_bytes(out / "README.md", card.encode())
    return remarks
