"""The detector `photo` of `geneval`: a model of transformers finds objects in photographs, CLIP names their colours.

Thresholds, colours, captions and the grey behind a masked object are those of GenEval's own script; its mmdet model
is replaced by its relative in transformers. docs/rewards/geneval.md says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field, PositiveInt
from torch import Tensor

from marble_rl import hub
from marble_rl.errors import InputError, suggestion
from marble_rl.prompts.colours import COLOURS
from marble_rl.rewards.builtin.detection import Detection, Mask
from marble_rl.rewards.builtin.embedder import ClipEmbedder, on_pillow
from marble_rl.rewards.builtin.geneval import standing_for
from marble_rl.rewards.core.base import Images
from marble_rl.section import Fraction, ModelPath, Section

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
"""How DETR's checkpoints label the unused numbers of COCO's 91 classes."""
SIDE = 384
"""Size at which transformers measures Mask2Former's masks, whatever the picture's."""
LONGEST = 5 / 3
"""Most that the longer side of a picture has in shorter sides, as the model sees it: 1333 to 800, usual for COCO."""
STRIDE = 32
"""RT-DETR takes only pictures whose sides are multiples of this."""


class PhotoDetector:
    """Mask2Former, or a detector of the DETR family, in transformers' format."""

    class Params(Section):
        model: ModelPath = "facebook/mask2former-swin-small-coco-instance"
        """Hub id or folder: Mask2Former for instances, or a detector of the DETR family."""
        colour_model: ModelPath = "openai/clip-vit-large-patch14"
        """Hub id or folder of a `CLIPModel`."""
        threshold: Fraction = 0.3
        """Least confidence of an object."""
        counting_threshold: Fraction = 0.9
        """The same where the prompt's tag is `counting`."""
        max_objects: PositiveInt = 16
        """Most objects of one class."""
        side: Annotated[int, Field(ge=STRIDE, multiple_of=STRIDE)] | None = None
        """Shorter side, in pixels, of the pictures as the model sees them; null: as the checkpoint's image processor
        says."""
        batch_size: PositiveInt = 8
        """Pictures or cut-outs at a time; changes memory, not scores."""

    def __init__(self, **params: Any) -> None:
        self.params = self.Params(**params)
        self._finder: Any = None
        self._colours: Any = None

    def load(self, device: torch.device) -> None:
        p = self.params
        self._finder = load_finder(p.model, device, p.side)
        self._colours = ColourNamer(ClipEmbedder(p.colour_model, device, key="colour_model"), p.batch_size)

    def detect(self, images: Images) -> list[list[Detection]]:
        """Objects of each picture, the surest first, without their colours."""
        objects: list[list[Detection]] = []
        for batch in np.split(images, range(self.params.batch_size, len(images), self.params.batch_size)):
            objects += self._finder.find(batch, self.params.threshold)
        return [self._sifted(of_picture) for of_picture in objects]

    def attend(
        self, images: Images, objects: Sequence[list[Detection]], wanted: Sequence[Mapping[str, Any]]
    ) -> list[list[Detection]]:
        """Leave out objects that are not sure enough to be counted, and name the colours that are asked for."""
        for metadata in wanted:
            check_answerable(metadata, self._finder.names)
        least = self.params.counting_threshold
        sure = [
            [o for o in of_picture if metadata.get("tag") != "counting" or o.confidence > least]
            for of_picture, metadata in zip(objects, wanted, strict=True)
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
        """The surest of each class."""
        kept: list[Detection] = []
        seen: dict[str, int] = {}
        for item in sorted(objects, key=lambda o: -o.confidence):
            seen[item.name] = seen.get(item.name, 0) + 1
            if seen[item.name] <= self.params.max_objects:
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
        objects = []
        for label, score, mask in zip(labels.tolist(), (likely * certainty).tolist(), masks, strict=True):
            if score > threshold and label in self.names and bool(mask.any()):
                objects.append(_outlined(self.names[label], score, mask.cpu().numpy()))
        return objects


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
        # DETR counts as a model for segmentation too, so the name decides.
        segments = AutoConfig.from_pretrained(source, trust_remote_code=False).model_type == "mask2former"
        kind = AutoModelForUniversalSegmentation if segments else AutoModelForObjectDetection
        model = kind.from_pretrained(source, dtype=torch.float32, weights_only=True, trust_remote_code=False)
        processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False, **on_pillow())
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
                "Fix the prompt file or choose another model"
            )
        if entry.get("color", COLOURS[0]) not in COLOURS:
            raise InputError(f"the prompt asks for the color {entry['color']!r}; expected one of {', '.join(COLOURS)}")


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


def _outlined(name: str, score: float, mask: Mask) -> Detection:
    """An object by its mask [H, W]."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    left, top, right, bottom = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
    return Detection(name, "", (left, top, right, bottom), score, mask[top:bottom, left:right])
