"""Where lines of text are in a picture: RapidOCR's detection, and the order in which people read what it finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Picture = npt.NDArray[np.uint8]
SMALLEST_SIDE = 32
"""The detection model works on multiples of it."""


class LineFinder:
    """Searches in a copy whose longer side has at most ``side`` pixels, and cuts lines out of the picture itself."""

    def __init__(self, side: int) -> None:
        from rapidocr import RapidOCR

        threads = "EngineConfig.onnxruntime.{}_op_num_threads"
        self._detector = RapidOCR(
            params={
                "Global.log_level": "error",  # it warns of every picture without text
                "Global.use_cls": False,
                "Global.use_rec": False,
                "Det.limit_type": "max",
                "Det.limit_side_len": side,
                threads.format("intra"): torch.get_num_threads(),
                threads.format("inter"): 1,
            }
        )
        self.find(np.zeros((SMALLEST_SIDE, SMALLEST_SIDE, 3), dtype=np.uint8))  # it loads its weights when first called

    def find(self, picture: Picture) -> list[Picture]:
        """Lines [h, w, 3], turned upright, in reading order."""
        picture = np.ascontiguousarray(picture)
        boxes = self._detector(np.ascontiguousarray(picture[..., ::-1])).boxes  # it expects BGR
        if boxes is None:
            return []
        lines: list[Picture] = self._detector.crop_text_regions(picture, boxes[reading_order(boxes)])
        return lines


def reading_order(boxes: npt.NDArray[np.floating[Any]]) -> list[int]:
    """Of boxes [N, 4, (x, y)], corners clockwise from the upper left: rows from top to bottom, each from left to right.

    A box continues a row if its middle is nearer to that of the row's first box than half their mean height. Down and
    right are meant along the text, which may be tilted: the long upper edges say how.
    """
    along = (boxes[:, 1] - boxes[:, 0]).sum(axis=0)
    along = along / max(float(np.linalg.norm(along)), 1e-9)
    middle = boxes.mean(axis=1)
    right, down = middle @ along, middle @ np.array([-along[1], along[0]])
    height = np.linalg.norm(boxes[:, 3] - boxes[:, 0], axis=1)
    rows: list[list[int]] = []
    for i in np.argsort(down, kind="stable").tolist():
        first = rows[-1][0] if rows else i
        if rows and down[i] - down[first] < (height[i] + height[first]) / 4:
            rows[-1].append(i)
        else:
            rows.append([i])
    return [i for row in rows for i in sorted(row, key=lambda i: float(right[i]))]
