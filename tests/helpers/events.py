"""What TensorBoard shows of a folder of event files, by its own reader."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, EventAccumulator


class Shown:
    def __init__(self, folder: Path) -> None:
        self._events = EventAccumulator(str(folder), size_guidance={SCALARS: 0, IMAGES: 0}).Reload()

    def figures(self) -> list[tuple[int, str, float]]:
        """(step, key, value), as often as it is there."""
        keys = self._events.Tags()["scalars"]
        return sorted((event.step, key, event.value) for key in keys for event in self._events.Scalars(key))

    def pictures(self) -> list[tuple[int, bytes]]:
        """(step, pixels)."""
        return [(step, pixels(io.BytesIO(data))) for step, data in self.files()]

    def files(self) -> list[tuple[int, bytes]]:
        """(step, file) of the pictures."""
        return [(event.step, event.encoded_image_string) for event in self._events.Images("samples")]

    def config(self) -> str:
        """The text shown last."""
        return str(self._events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode())


def pixels(file: Path | io.BytesIO) -> bytes:
    return np.asarray(Image.open(file).convert("RGB")).tobytes()


def written(run: Path) -> list[tuple[int, str, float]]:
    """The same of the run's metrics.jsonl, in the numbers of event files: single precision."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return sorted(
        (line["step"], key, float(np.float32(value))) for line in lines for key, value in line.items() if key != "step"
    )
