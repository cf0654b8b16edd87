"""Training every family at its published width, with few layers; and on all cards of a machine at once.

A pipeline is the tiny one of `tools.tiny` with a wider transformer: tokenizers, text encoders and autoencoder need not
be large to find out whether a family trains on a device, and how much memory its transformer takes.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from marble_rl.config import RunConfig
from marble_rl.devices import allocated_bytes, device_count, empty_cache, peak_bytes
from marble_rl.memory.estimate import estimate_run
from marble_rl.models import adapter_of
from marble_rl.models.parts import TRANSFORMERS
from marble_rl.training.trainer import Trainer
from tools.gpu_check.checks import CheckFailed
from tools.published import PUBLISHED
from tools.tiny import BUILDERS

PUBLISHED_AS = {
    "sd3": "sd3.5-medium",
    "flux": "flux.1-dev",
    "qwen_image": "qwen-image",
    "wan": "wan2.1-1.3b",
    "wan22_5b": "wan2.2-ti2v-5b",
    "wan22_14b": "wan2.2-t2v-a14b",
}
WIDTHS = ("attention_head_dim", "num_attention_heads", "caption_projection_dim", "ffn_dim")
"""Settings that are taken from the published transformer; its depth, and the sizes of its inputs, are not."""


def check_family(name: str) -> Callable[[torch.device], str]:
    """The check of one family."""

    def check(device: torch.device) -> str:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            width = build_wide(name, folder / "model", published=device.type != "cpu")
            config = _config(name, folder / "model", device)
            estimated = estimate_run(config, device).peak
            before = _fresh_counters(device)
            Trainer(config, folder / "run", console=Console(file=io.StringIO())).train()
            lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        broken = sorted({key for line in lines for key, value in line.items() if not math.isfinite(value)})
        if broken or len(lines) != 2:
            raise CheckFailed(f"{len(lines)} steps, not finite: {broken}")
        step = sum(lines[-1][f"time/{stage}"] for stage in ("rollout", "gradients"))
        return f"{width} wide, two steps, the second {step:.2f} s; memory {_against(estimated, before, device)}"

    return check


def build_wide(name: str, folder: Path, published: bool) -> int:
    """The tiny pipeline, its transformer as wide as the ``published`` one. Returns the width."""
    BUILDERS[name](folder)
    pipeline = adapter_of(folder / "model_index.json").diffusers_class().from_pretrained(folder)
    if published:
        old = pipeline.transformer
        wide = PUBLISHED[PUBLISHED_AS[name]][1]["transformer"][2]
        # Rotary embeddings are split over the axes of a head.
        axes = {"axes_dims_rope": [16, 56, 56]} if "axes_dims_rope" in old.config else {}
        sizes = {key: wide[key] for key in WIDTHS if key in wide}
        for part in TRANSFORMERS:
            if getattr(pipeline, part, None) is not None:
                setattr(pipeline, part, type(old).from_config({**old.config, **sizes, **axes}))
        pipeline.save_pretrained(folder)
    config = pipeline.transformer.config
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def several_ranks(device: torch.device) -> str:
    """Two steps on every card of the machine, under torchrun: NCCL, or what torch has for them."""
    ranks = 2 if device.type == "cpu" else device_count()
    if ranks < 2:
        return "one card, nothing to exchange"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        BUILDERS["sd3"](folder / "model")
        config = _config("sd3", folder / "model", torch.device(device.type), groups=2 * ranks)
        (folder / "config.json").write_text(config.model_dump_json())
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launch, "-m", "marble_rl.cli", "train", str(folder / "config.json"), "--out", str(folder / "run")]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MARBLE_TIMEOUT": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            said = [line for line in done.stdout.splitlines() if line.startswith(("error:", "stopped:", "internal"))]
            raise CheckFailed(f"exit {done.returncode}: {' '.join(said) or done.stdout.strip()[-1500:]}")
        last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    return f"two steps on {ranks} ranks; collectives of the second {last['time/waiting']:.3f} s"


def _config(name: str, model: Path, device: torch.device, groups: int = 2) -> RunConfig:
    video = name.startswith("wan")
    images = [{"name": "small", "type": "jpeg_compressibility"}, {"name": "bright", "type": "brightness"}]
    videos = [{"name": r["name"], "type": "frames", "params": {"reward": {"type": r["type"]}}} for r in images]
    size = {"height": 16, "width": 16} if device.type == "cpu" else {"height": 128, "width": 128}
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "device": str(device), "text_length": 16},
            "lora": {"rank": 8, "alpha": 16},
            "prompts": {"train": [{"name": "things", "texts": [f"{count} red balls" for count in range(groups)]}]},
            "rewards": videos if video else images,
            "rollout": {"groups": groups, "group_size": 2, "steps": 2, **size, **({"frames": 5} if video else {})},
            "loss": {"timesteps_per_sample": 1, "timestep_fraction": 1.0},
            "balance": {"type": "fair"},
            "trainer": {"steps": 2, "micro_batch": 2},
            "logging": {"images_every": None},
        }
    )


def _fresh_counters(device: torch.device) -> int:
    """Begin to count the peak anew. Returns the bytes that are in use already."""
    gc.collect()  # the model of the check before
    empty_cache()
    reset = _counter(device, "reset_peak_memory_stats")
    if reset is not None:
        reset(device)
    return allocated_bytes(device)


def _against(estimated: int, before: int, device: torch.device) -> str:
    """The estimate beside the measured peak."""
    text = f"estimated {estimated / 2**20:.0f} MiB"
    if _counter(device, "max_memory_allocated") is None:
        return f"{text}, not counted on {device.type}"
    return f"{text}, measured {(peak_bytes(device) - before) / 2**20:.0f} MiB"


def _counter(device: torch.device, name: str) -> Any:
    return None if device.type == "cpu" else getattr(torch.get_device_module(device), name, None)
