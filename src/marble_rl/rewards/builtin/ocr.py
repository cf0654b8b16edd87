"""Text rendering: what RapidOCR's models (PP-OCR) read, against the text that the prompt asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from pydantic import Field

from marble_rl.rewards.builtin.text_lines import SMALLEST_SIDE, LineFinder
from marble_rl.rewards.builtin.text_rendering import TextRenderingParams, TextRenderingReward, edit_distance
from marble_rl.rewards.core.base import Images

LINE_HEIGHT = 48
"""Height in pixels of the lines that the model was trained on."""
BLANK = 0
"""The CTC class for `no character here`."""
LEAST_CONFIDENCE = 0.5
"""Lines of a page that are read with a lower mean probability are not taken for text. RapidOCR's own default."""
DETECTION_SIDE = 384
"""Finds letters of 24 pixels in a picture of 1024x1024, 1.5 times as fast as 512 does (docs/rewards/ocr.md)."""


class Ocr(TextRenderingReward):
    """How well the text in the picture is the one in quotes in the prompt, in [0, 1], by normalised edit distance."""

    class Params(TextRenderingParams):
        detection_side: Annotated[int, Field(ge=SMALLEST_SIDE)] = DETECTION_SIDE
        """For pages: text is searched for in a copy whose longer side has at most so many pixels, then read in full
        resolution."""

    params: Params
    _session: Any
    _characters: list[str]
    _lines: LineFinder

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
        if self.params.mode != "line":
            self._lines = LineFinder(self.params.detection_side)

    def read_lines(self, images: Images) -> list[str]:
        return [self._decode(scores.argmax(axis=-1)) for scores in self._recognise(images)]

    def read_pages(self, images: Images) -> list[str]:
        return [" ".join(self._page(image)) for image in images]

    def _page(self, image: npt.NDArray[np.uint8]) -> list[str]:
        """Every line is recognised by itself, in its own width. On a CPU, batches save no time but cost padding."""
        texts = []
        for line in self._lines.find(image):
            (scores,) = self._recognise(line[None])
            classes = scores.argmax(axis=-1)
            if _confidence(scores, classes) >= LEAST_CONFIDENCE:
                texts.append(self._decode(classes))
        return texts

    def _recognise(self, images: Images) -> npt.NDArray[np.float32]:
        """[B, steps along the line, classes], probabilities."""
        (name,) = (i.name for i in self._session.get_inputs())
        scores: npt.NDArray[np.float32]
        (scores,) = self._session.run(None, {name: _network_input(images)})
        return scores

    def _decode(self, classes: npt.NDArray[np.int64]) -> str:
        """CTC: equal neighbours are one character, then blanks fall out."""
        return "".join(self._characters[c] for c in classes[_characters_at(classes)])


def _characters_at(classes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Steps of a line at which a new character begins."""
    return np.flatnonzero((np.diff(classes, prepend=-1) != 0) & (classes != BLANK))


def _confidence(scores: npt.NDArray[np.float32], classes: npt.NDArray[np.int64]) -> float:
    """Mean probability of the characters; 0 where there are none."""
    places = _characters_at(classes)
    return float(scores[places, classes[places]].mean()) if len(places) else 0.0


def _network_input(images: Images) -> npt.NDArray[np.float32]:
    """[B, 3, 48, W], BGR in [-1, 1], in the pictures' proportions."""
    height, width = images.shape[1:3]
    size = (max(round(width * LINE_HEIGHT / height), LINE_HEIGHT), LINE_HEIGHT)
    resized = np.stack([np.asarray(Image.fromarray(i).resize(size, Image.Resampling.BILINEAR)) for i in images])
    return (resized[..., ::-1].transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype(np.float32)
