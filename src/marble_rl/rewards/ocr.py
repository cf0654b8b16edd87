"""Text rendering: what RapidOCR's recognition model reads, against the text that the prompt asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from marble_rl.rewards.base import Images
from marble_rl.rewards.reading import ReadingReward, edit_distance

LINE_HEIGHT = 48
"""Height in pixels of the lines that the model was trained on."""
BLANK = 0
"""The CTC class for `no character here`."""


class Ocr(ReadingReward):
    """1 - normalised edit distance between the text in the picture and the one in quotes in the prompt, in [0, 1].

    ``region`` ([left, top, right, bottom], each in 0..1) is where the line of text is looked for.
    """

    def __init__(self, region: Sequence[float] = (0.0, 0.0, 1.0, 1.0)) -> None:
        super().__init__(region)
        self._session: Any = None
        self._characters: list[str] = []

    def load(self, device: torch.device) -> None:
        try:
            import onnxruntime
            import rapidocr
        except ImportError as error:
            raise ImportError(f"{error.name} is not installed; run: pip install 'marble-rl[ocr]'") from error
        edit_distance()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        weights = min((Path(rapidocr.__file__).parent / "models").glob("*_rec_*.onnx"))
        self._session = onnxruntime.InferenceSession(weights, options, providers=["CPUExecutionProvider"])
        listed = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *listed, " "]

    def read(self, images: Images) -> list[str]:
        (name,) = (i.name for i in self._session.get_inputs())
        (scores,) = self._session.run(None, {name: _lines(images)})
        return [self._decode(classes) for classes in scores.argmax(axis=-1)]

    def _decode(self, classes: npt.NDArray[np.int64]) -> str:
        """CTC: equal neighbours are one character, then blanks fall out."""
        changed = np.flatnonzero(np.diff(classes, prepend=-1))
        return "".join(self._characters[c] for c in classes[changed] if c != BLANK)


def _lines(images: Images) -> npt.NDArray[np.float32]:
    """[B, 3, 48, W], BGR in [-1, 1], in the pictures' proportions."""
    height, width = images.shape[1:3]
    size = (max(round(width * LINE_HEIGHT / height), LINE_HEIGHT), LINE_HEIGHT)
    resized = np.stack([np.asarray(Image.fromarray(i).resize(size, Image.Resampling.BILINEAR)) for i in images])
    return (resized[..., ::-1].transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype(np.float32)
