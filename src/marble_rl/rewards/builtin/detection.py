"""Objects in photographs for `geneval`: a detector of transformers finds them, CLIP names their colours.

Thresholds, colours, captions and the grey behind a masked object are those of GenEval's own script; its mmdet model
is replaced by its relative in transformers. docs/rewards/geneval.md says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from marble_rl import hub
from marble_rl.errors import InputError, suggestion
from marble_rl.prompts.colours import COLOURS
from marble_rl.rewards.builtin.embedder import ClipEmbedder, on_pillow
from marble_rl.rewards.builtin.geneval import Detection, Mask, standing_for
from marble_rl.rewards.core.base import Images

CAPTIONS = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
GREY = 0x99
"""What surrounds a masked object when its colour is named."""
GENEVAL_NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    # Some checkpoints (RT-DETR's) call these as Pascal VOC does.
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
"""Where a checkpoint's name of a COCO class is not GenEval's."""
NO_CLASS = "N/A"
"""DETR's checkpoints call the unused numbers of COCO's 91 classes so."""
SIDE = 384
"""transformers measures Mask2Former's masks at this size, whatever the picture's."""
LONGEST = 5 / 3
"""The longer side of a picture as the model sees it, at most, in shorter sides: COCO's custom, 1333 to 800."""
STRIDE = 32
"""RT-DETR takes only pictures whose sides are multiples of this."""


class PhotoDetector:
    """Mask2Former, or a detector of the DETR family, in transformers' format, by hub id or folder.

    Objects count from a confidence of ``threshold``, where the prompt's tag is `counting` from ``counting_threshold``;
    at most ``max_objects`` of a class. Of two of a class that overlap by ``max_overlap`` (intersection over union) or
    more, the surer one is kept; at 1 both are. The model sees pictures with a shorter side of ``side`` pixels; without
    it, as the checkpoint's image processor says.
    """

    def __init__(
        self,
        model: str = "facebook/mask2former-swin-small-coco-instance",
        colour_model: str = "openai/clip-vit-large-patch14",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: int = 16,
        max_overlap: float = 1.0,
        side: int | None = None,
        batch_size: int = 8,
    ) -> None:
        for key, share in (
            ("threshold", threshold),
            ("counting_threshold", counting_threshold),
            ("max_overlap", max_overlap),
        ):
            if not 0 <= share <= 1:
                raise InputError(f"{key}: must be from 0 to 1, not {share}")
        for key, count in (("max_objects", max_objects), ("batch_size", batch_size)):
            if count < 1:
                raise InputError(f"{key}: must be at least 1, not {count}")
        if side is not None and (side < STRIDE or side % STRIDE):
            raise InputError(f"side: must be a multiple of {STRIDE}, not {side}")
        self.model = model
        self.colour_model = colour_model
        self.threshold = threshold
        self.counting_threshold = counting_threshold
        self.max_objects = max_objects
        self.max_overlap = max_overlap
        self.side = side
        self.batch_size = batch_size
        self._finder: Any = None
        self._colours: Any = None

    def load(self, device: torch.device) -> None:
        self._finder = load_finder(self.model, device, self.side)
        self._colours = ColourNamer(ClipEmbedder(self.colour_model, device, key="colour_model"), self.batch_size)

    def detect(self, images: Images) -> list[list[Detection]]:
        """Objects of each picture, the surest first, their colours still open."""
        found: list[list[Detection]] = []
        for start in range(0, len(images), self.batch_size):
            found += self._finder.find(images[start : start + self.batch_size], self.threshold)
        return [self._sifted(objects) for objects in found]

    def attend(
        self, images: Images, found: Sequence[list[Detection]], wanted: Sequence[Mapping[str, Any]]
    ) -> list[list[Detection]]:
        """Leave out what is not sure enough to be counted, and name the colours that are asked for."""
        for metadata in wanted:
            check_answerable(metadata, self._finder.names)
        sure = [
            [o for o in objects if metadata.get("tag") != "counting" or o.confidence > self.counting_threshold]
            for objects, metadata in zip(found, wanted, strict=True)
        ]
        # Most objects are never checked for a colour; CLIP need not look at them.
        asked = [
            (number, item)
            for number, (objects, metadata) in enumerate(zip(sure, wanted, strict=True))
            for entry in metadata["include"]
            if "color" in entry
            for item in standing_for(objects, entry)
        ]
        colours = self._colours.name(
            [cut_out(images[number], item) for number, item in asked], [item.name for _, item in asked]
        )
        named = dict(zip(asked, colours, strict=True))
        return [
            [replace(item, colour=named.get((number, item), "")) for item in objects]
            for number, objects in enumerate(sure)
        ]

    def _sifted(self, objects: Sequence[Detection]) -> list[Detection]:
        """The surest of each class that do not repeat one another."""
        kept: list[Detection] = []
        seen: dict[str, int] = {}
        for item in sorted(objects, key=lambda o: -o.confidence):
            seen[item.name] = seen.get(item.name, 0) + 1
            rivals = [other for other in kept if other.name == item.name]
            repeats = self.max_overlap < 1 and any(overlap(item, other) >= self.max_overlap for other in rivals)
            if seen[item.name] <= self.max_objects and not repeats:
                kept.append(item)
        return kept


class _Finder:
    """A detector of transformers. ``size`` is how large it sees pictures, if not as its processor says."""

    def __init__(self, model: Any, processor: Any, size: Mapping[str, int] | None) -> None:
        self.model, self.processor = model, processor
        self.names = geneval_names(model.config.id2label)
        self._size = {} if size is None else {"size": dict(size)}

    def _outputs(self, images: Images) -> Any:
        """What the model says about the pictures."""
        prepared = self.processor(images=list(images), return_tensors="pt", **self._size)
        return self.model(**prepared.to(self.model.device))


class Segmenter(_Finder):
    """Mask2Former for instances: an object's box is the smallest around its mask."""

    @torch.no_grad()
    def find(self, images: Images, threshold: float) -> list[list[Detection]]:
        outputs = self._outputs(images)
        return [
            self._instances(classes, masks, images.shape[1:3], threshold)
            for classes, masks in zip(outputs.class_queries_logits, outputs.masks_queries_logits, strict=True)
        ]

    def _instances(
        self, class_logits: Tensor, mask_logits: Tensor, size: tuple[int, ...], threshold: float
    ) -> list[Detection]:
        """One picture's objects from class logits [Q, C + 1] and mask logits [Q, h, w].

        The numbers are those of the processor's `post_process_instance_segmentation`, which works on the CPU and on
        all Q masks. A score is at most its class's probability, so most masks need not be looked at.
        """
        probabilities = class_logits.softmax(-1)[:, :-1]
        likely, places = probabilities.flatten().topk(len(probabilities))
        likely, places = likely[likely > threshold], places[likely > threshold]
        if not len(places):
            return []
        queries, labels = places // probabilities.shape[1], places % probabilities.shape[1]
        logits = F.interpolate(mask_logits[queries][None], size=(SIDE, SIDE), mode="bilinear", align_corners=False)[0]
        inside = (logits > 0).float()
        certainty = (logits.sigmoid() * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
        masks = F.interpolate(inside[None], size=tuple(size), mode="nearest")[0] > 0
        found = []
        for label, score, mask in zip(labels.tolist(), (likely * certainty).tolist(), masks, strict=True):
            if score > threshold and label in self.names and bool(mask.any()):
                found.append(_outlined(self.names[label], score, mask.cpu().numpy()))
        return found


class BoxFinder(_Finder):
    """A detector of the DETR family: boxes, no masks."""

    @torch.no_grad()
    def find(self, images: Images, threshold: float) -> list[list[Detection]]:
        outputs = self._outputs(images)
        sizes = [(images.shape[1], images.shape[2])] * len(images)
        results = self.processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=sizes)
        return [self._boxes(result) for result in results]

    def _boxes(self, result: Mapping[str, Tensor]) -> list[Detection]:
        rows = zip(result["labels"].tolist(), result["scores"].tolist(), result["boxes"].tolist(), strict=True)
        return [
            Detection(self.names[label], "", (left, top, right, bottom), score)
            for label, score, (left, top, right, bottom) in rows
            if label in self.names
        ]


def load_finder(path: str, device: torch.device, side: int | None = None) -> Segmenter | BoxFinder:
    """The detector at a folder or hub id, whichever of the two kinds it is."""
    from transformers import (
        AutoConfig,
        AutoImageProcessor,
        AutoModelForObjectDetection,
        AutoModelForUniversalSegmentation,
    )

    with hub.explained("model", path, "a detector with its image processor in transformers' format"):
        source = str(Path(path).expanduser())
        # DETR counts as a model for segmentation too, so its kind is told by the name.
        segments = AutoConfig.from_pretrained(source).model_type == "mask2former"
        kind = AutoModelForUniversalSegmentation if segments else AutoModelForObjectDetection
        model = kind.from_pretrained(source, dtype=torch.float32)
        processor = AutoImageProcessor.from_pretrained(source, **on_pillow())
    model = model.to(device).eval().requires_grad_(False)
    # RT-DETR was trained on squares. Mask2Former was not, whatever its published processors say.
    square = not segments and bool(processor.size.get("height"))
    return (Segmenter if segments else BoxFinder)(model, processor, None if side is None else _size(side, square))


def _size(side: int, square: bool) -> dict[str, int]:
    if square:
        return {"height": side, "width": side}
    return {"shortest_edge": side, "longest_edge": round(side * LONGEST)}


def geneval_names(labels: Mapping[int, str]) -> dict[int, str]:
    """A checkpoint's class numbers with the names that GenEval's prompts use."""
    return {number: GENEVAL_NAMES.get(name, name) for number, name in labels.items() if name != NO_CLASS}


def check_answerable(metadata: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """An object or colour that can never be found is a mistake in the prompt file, not a score of 0."""
    for entry in (*metadata["include"], *metadata.get("exclude", ())):
        name = entry["class"]
        if name not in names.values():
            near = suggestion(GENEVAL_NAMES.get(name, name), list(names.values()))
            raise InputError(
                f"the prompt asks for {name!r}, which the detector does not know.{near} "
                "Mend the prompt file or choose another model"
            )
        if entry.get("color", COLOURS[0]) not in COLOURS:
            raise InputError(
                f"the prompt asks for the color {entry['color']!r}; it must be one of {', '.join(COLOURS)}"
            )


class ColourNamer:
    """Zero-shot CLIP: the colour whose captions, averaged, are nearest to the picture of an object."""

    def __init__(self, clip: ClipEmbedder, batch_size: int) -> None:
        self.clip = clip
        self.batch_size = batch_size
        self._captions: dict[str, Tensor] = {}

    def name(self, pictures: Sequence[Image.Image], names: Sequence[str]) -> list[str]:
        if not pictures:
            return []
        return [COLOURS[best] for best in self.cosines(pictures, names).argmax(-1).tolist()]

    def cosines(self, pictures: Sequence[Image.Image], names: Sequence[str]) -> Tensor:
        """Of each picture, of an object with that name, with each colour: [N, 10]."""
        starts = range(0, len(pictures), self.batch_size)
        seen = torch.cat([self.clip.images(pictures[start : start + self.batch_size]) for start in starts])
        return (seen[:, None] * torch.stack([self._colours_of(name) for name in names])).sum(-1)

    def _colours_of(self, name: str) -> Tensor:
        """One unit vector per colour [10, D]."""
        if name not in self._captions:
            texts = [caption.format(colour=colour, name=name) for colour in COLOURS for caption in CAPTIONS]
            each = self.clip.texts(texts).unflatten(0, (len(COLOURS), len(CAPTIONS)))
            self._captions[name] = F.normalize(each.mean(1), dim=-1)
        return self._captions[name]


def cut_out(image: npt.NDArray[np.uint8], item: Detection) -> Image.Image:
    """The object's part of a picture [H, W, 3], at least a pixel; grey around it where its mask is known."""
    left, top, right, bottom = (round(edge) for edge in item.box)
    left, top = min(max(left, 0), image.shape[1] - 1), min(max(top, 0), image.shape[0] - 1)
    part = image[top : max(bottom, top + 1), left : max(right, left + 1)]
    if item.mask is not None:
        part = np.where(item.mask[..., None], part, np.uint8(GREY))
    return Image.fromarray(part)


def overlap(first: Detection, second: Detection) -> float:
    """Intersection over union of two boxes."""
    (a, b, c, d), (e, f, g, h) = first.box, second.box
    common = max(min(c, g) - max(a, e), 0.0) * max(min(d, h) - max(b, f), 0.0)
    union = (c - a) * (d - b) + (g - e) * (h - f) - common
    return common / union if union > 0 else 0.0


def _outlined(name: str, score: float, mask: Mask) -> Detection:
    """An object by its mask [H, W]."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, top, right, bottom = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
    return Detection(name, "", (left, top, right, bottom), score, mask[top:bottom, left:right])
