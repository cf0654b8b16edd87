"""The detector for photographs on tiny random models in transformers' format, against what transformers computes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from marble_rl.errors import InputError
from marble_rl.prompts.colours import COLOURS
from marble_rl.rewards.builtin.detection import Detection
from marble_rl.rewards.builtin.embedder import ClipEmbedder, image_processor, on_pillow
from marble_rl.rewards.builtin.geneval import GenEval
from marble_rl.rewards.builtin.photo_detector import (
    CAPTIONS,
    GENEVAL_NAMES,
    GREY,
    ColourNamer,
    PhotoDetector,
    cut_out,
    geneval_names,
    load_finder,
)
from marble_rl.rewards.core.base import Images, RewardBatch
from marble_rl.rewards.core.registry import build_rewards
from marble_rl.rewards.core.scoring import Scorer
from marble_rl.rewards.core.settings import RewardConfig
from marble_rl.types import Prompt
from reward_device import DEVICE
from tools.mini.tokenizers import clip_tokenizer

pytestmark = pytest.mark.full

HEIGHT, WIDTH = 48, 60
LABELS = {0: "cat", 1: "mouse", 2: "N/A", 3: "sofa", 4: "dog"}
KINDS = ("mask2former", "detr", "rt_detr")
TEXT_LENGTH = 40


def scattered(model: Any) -> Any:
    """With larger random weights, so that a model's answers differ from picture to picture and query to query."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.5 if weight.shape[-1] > 3 else 0.2)
    return model


def mask2former() -> tuple[Any, Any]:
    swin = transformers.SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=12,
        id2label=LABELS,
    )
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    return model, transformers.Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})


def detr() -> tuple[Any, Any]:
    resnet = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        backbone_config=resnet,
        use_timm_backbone=False,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=12,
        id2label=LABELS,
    )
    model = transformers.DetrForObjectDetection(config)
    return model, transformers.DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 96})


def rt_detr() -> tuple[Any, Any]:
    resnet = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic", out_indices=[2, 3, 4]
    )
    config = transformers.RTDetrConfig(
        backbone_config=resnet,
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 8, 8],
        encoder_ffn_dim=16,
        encoder_attention_heads=2,
        d_model=16,
        num_queries=12,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        id2label=LABELS,
    )
    model = transformers.RTDetrForObjectDetection(config)
    return model, transformers.RTDetrImageProcessor(size={"height": 64, "width": 64})


def clip() -> tuple[Any, Any]:
    tokenizer = clip_tokenizer(TEXT_LENGTH)
    layers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {**layers, **tokens, "vocab_size": len(tokenizer), "max_position_embeddings": TEXT_LENGTH}
    vision = {**layers, "image_size": 16, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    return transformers.CLIPModel(config), processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("detectors")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for build in (mask2former, detr, rt_detr, clip):
            model, processor = build()
            scattered(model).save_pretrained(folder / build.__name__)
            processor.save_pretrained(folder / build.__name__)
    clip_tokenizer(TEXT_LENGTH).save_pretrained(folder / "clip")
    return folder


@pytest.fixture(scope="module")
def images() -> Images:
    squares = np.random.default_rng(3).integers(0, 256, (5, HEIGHT // 6, WIDTH // 6, 3), dtype=np.uint8)
    return squares.repeat(6, axis=1).repeat(6, axis=2)


def outputs(folder: Path, images: Images, kind: str) -> tuple[Any, Any]:
    """The model's own answer, and its processor."""
    classes = {
        "mask2former": transformers.Mask2FormerForUniversalSegmentation,
        "detr": transformers.DetrForObjectDetection,
        "rt_detr": transformers.RTDetrForObjectDetection,
    }
    model = classes[kind].from_pretrained(folder / kind).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder / kind)
    with torch.no_grad():
        return model(**processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")), processor


def surest_first(objects: Sequence[Detection]) -> list[Detection]:
    return sorted(objects, key=lambda o: (-round(o.confidence, 5), o.name, o.box))


NAMED = {0: "cat", 1: "computer mouse", 3: "couch", 4: "dog"}


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_mask2former_finds_what_transformers_finds(folder: Path, images: Images, threshold: float) -> None:
    answer, processor = outputs(folder, images, "mask2former")
    ours = load_finder(str(folder / "mask2former"), DEVICE).find(images, threshold)
    assert compared(ours, answer, processor, threshold) >= len(images)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6])
def test_separate_masks_are_those_of_transformers(folder: Path, threshold: float) -> None:
    """Discs instead of a random model's masks, which fill the picture."""
    generator = torch.Generator().manual_seed(2)
    x, y, radius = (torch.rand(2, 12, 1, 1, generator=generator) * scale for scale in (20.0, 16.0, 5.0))
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(20.0), indexing="ij")
    masks = radius - 1 - ((rows - y) ** 2 + (columns - x) ** 2).sqrt()
    classes = 3 * torch.randn(2, 12, len(LABELS) + 1, generator=generator)
    answer = SimpleNamespace(class_queries_logits=classes, masks_queries_logits=masks)
    finder = load_finder(str(folder / "mask2former"), DEVICE)
    ours = [finder._instances(c, m, (HEIGHT, WIDTH), threshold) for c, m in zip(classes, masks, strict=True)]
    assert compared(ours, answer, finder.processor, threshold) >= 4
    assert len({o.box for objects in ours for o in objects}) >= 3


def compared(ours: Sequence[list[Detection]], answer: Any, processor: Any, threshold: float) -> int:
    """How many objects there are; ours and those of transformers' own post-processing must be the same."""
    sizes = [(HEIGHT, WIDTH)] * len(ours)
    theirs = processor.post_process_instance_segmentation(
        answer, threshold=threshold, target_sizes=sizes, return_binary_maps=True
    )
    for objects, result in zip(ours, theirs, strict=True):
        # Without any object, transformers gives a map of the whole picture in place of the masks.
        pairs = zip(result["segments_info"], result["segmentation"], strict=bool(result["segments_info"]))
        unmatched = list(objects)
        for segment, mask in pairs:
            if segment["label_id"] in NAMED:
                same = [i for i, o in enumerate(unmatched) if _same(o, segment, mask.numpy() > 0)]
                del unmatched[same[0]]
        assert not unmatched
    return sum(map(len, ours))


def _same(item: Detection, segment: dict[str, Any], whole: Any) -> bool:
    """Name, score, mask and box are those of a segment with its mask of the whole picture."""
    left, top, right, bottom = (int(edge) for edge in item.box)
    placed = np.zeros((HEIGHT, WIDTH), dtype=bool)
    placed[top:bottom, left:right] = item.mask
    rows, columns = np.nonzero(whole)
    tight = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    return (
        item.name == NAMED[segment["label_id"]]
        and abs(item.confidence - segment["score"]) < 2e-6
        and bool((placed == whole).all())
        and item.box == tight
    )


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["detr", "rt_detr"])
def test_detr_finds_what_transformers_finds(folder: Path, images: Images, kind: str, threshold: float) -> None:
    answer, processor = outputs(folder, images, kind)
    sizes = torch.tensor([[HEIGHT, WIDTH]] * len(images))
    theirs = processor.post_process_object_detection(answer, threshold=threshold, target_sizes=sizes)
    ours = load_finder(str(folder / kind), DEVICE).find(images, threshold)
    compared = 0
    for objects, result in zip(ours, theirs, strict=True):
        known = [i for i, label in enumerate(result["labels"].tolist()) if label in NAMED]
        assert [o.name for o in objects] == [NAMED[result["labels"][i].item()] for i in known]
        assert [o.confidence for o in objects] == pytest.approx([result["scores"][i].item() for i in known], abs=1e-5)
        for o, i in zip(objects, known, strict=True):
            assert o.box == pytest.approx(result["boxes"][i].tolist(), abs=1e-3)
            assert o.mask is None
            compared += 1
    assert compared >= len(images)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_can_be_shown_larger(folder: Path, images: Images, kind: str) -> None:
    """In their own shape (Mask2Former takes multiples of 32) or as a square; boxes stay in the picture's pixels."""
    finder = load_finder(str(folder / kind), DEVICE, side=96)
    shown: list[tuple[int, ...]] = []
    finder.model.register_forward_pre_hook(
        lambda _, __, given: shown.append(tuple(given["pixel_values"].shape)), with_kwargs=True
    )
    (found,) = finder.find(images[:1], 0.0)
    assert shown == [(1, 3, 96, {"mask2former": 128, "detr": 120, "rt_detr": 96}[kind])]
    assert all(o.box[2] - o.box[0] <= WIDTH * 1.01 and o.box[3] - o.box[1] <= HEIGHT * 1.01 for o in found)


def photo(folder: Path, kind: str, **settings: Any) -> PhotoDetector:
    detector = PhotoDetector(model=str(folder / kind), colour_model=str(folder / "clip"), **settings)
    detector.load(DEVICE)
    return detector


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found_does_not_depend_on_the_batch(folder: Path, images: Images, kind: str) -> None:
    detector = photo(folder, kind, threshold=0.1)
    together = detector.detect(images)
    assert sum(map(len, together)) >= len(images)
    detector.batch_size = 2
    alone = [detector.detect(image[None])[0] for image in images]
    for other in (detector.detect(images), alone, detector.detect(images[::-1])[::-1]):
        for ours, theirs in zip(together, other, strict=True):
            assert len(ours) == len(theirs)
            for a, b in zip(surest_first(ours), surest_first(theirs), strict=True):
                assert a.name == b.name
                assert a.confidence == pytest.approx(b.confidence, abs=1e-4)
                assert a.box == pytest.approx(b.box, abs=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reward_does_not_depend_on_the_batch(folder: Path, images: Images, kind: str) -> None:
    params = {"model": str(folder / kind), "colour_model": str(folder / "clip"), "threshold": 0.05, "credit": "partial"}
    names = ("cat", "dog", "computer mouse", "couch", "cat")
    wanted = [{"include": [{"class": n, "count": 1, "color": c}]} for n, c in zip(names, COLOURS, strict=False)]
    batch = RewardBatch(images, [Prompt(i, "x", "s", metadata) for i, metadata in enumerate(wanted)])
    reward = loaded(detector="photo", **params)
    together = reward.score(batch)
    reward.detector.batch_size = reward.detector._colours.batch_size = 2
    assert together == reward.score(batch)
    assert together == [
        reward.score(RewardBatch(image[None], [prompt]))[0] for image, prompt in zip(images, batch.prompts, strict=True)
    ]
    assert set(together) <= {0, 0.5, 1}


def loaded(**params: Any) -> Any:
    configs = [RewardConfig(type="geneval", name="objects", params=params)]
    rewards = build_rewards(configs)
    Scorer(configs, rewards).load(DEVICE)
    return rewards["objects"]


def installed_transformers() -> Any:
    """The module as code that imports it now gets it: its first use of a class may put another in its place."""
    assert transformers.CLIPImageProcessor
    return sys.modules["transformers"]


def test_pictures_are_resized_by_pillow_whatever_else_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a suffix the name belongs to torchvision's variant, which would change scores from machine to machine."""
    monkeypatch.setattr(installed_transformers(), "CLIPImageProcessor", None)
    embedder = ClipEmbedder(str(folder / "clip"), DEVICE)
    assert type(embedder.image_processor) is transformers.CLIPImageProcessorPil
    asked: list[dict[str, Any]] = []
    plain = transformers.AutoImageProcessor.from_pretrained

    def noted(path: str, **settings: Any) -> Any:
        asked.append(settings)
        return plain(path, **settings)

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", noted)
    finders = [load_finder(str(folder / kind), DEVICE) for kind in KINDS]
    assert [options["backend"] for options in asked] == ["pil"] * len(KINDS)
    assert all(type(finder.processor).__name__.endswith("Pil") for finder in finders)


def test_older_transformers_have_pillows_variant_under_the_plain_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_transformers(), "CLIPImageProcessorPil", None)
    assert image_processor() is transformers.CLIPImageProcessor
    assert on_pillow() == {"use_fast": False}


OBJECT_NAMES = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,parking meter,"
    "bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,handbag,tie,suitcase,frisbee,"
    "skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,"
    "cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,"
    "potted plant,bed,dining table,toilet,tv,laptop,computer mouse,tv remote,computer keyboard,cell phone,microwave,"
    "oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,hair drier,toothbrush"
)
"""GenEval's object_names.txt."""
ALL_NAMES = OBJECT_NAMES.split(",")
COCO = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
VOC = {
    "motorcycle": "motorbike",
    "airplane": "aeroplane",
    "couch": "sofa",
    "potted plant": "pottedplant",
    "dining table": "diningtable",
    "tv": "tvmonitor",
}


@pytest.mark.parametrize("words", [COCO, COCO | VOC, {}], ids=["coco", "with Pascal VOC's words", "GenEval's own"])
def test_every_class_gets_genevals_name(words: dict[str, str]) -> None:
    assert len(ALL_NAMES) == 80
    labels = dict(enumerate([words.get(name, name) for name in ALL_NAMES]))
    assert geneval_names(labels) == dict(enumerate(ALL_NAMES))
    assert set(GENEVAL_NAMES.values()) <= set(ALL_NAMES)
    assert not set(GENEVAL_NAMES) & set(ALL_NAMES)


def test_unused_numbers_have_no_name() -> None:
    assert geneval_names({0: "N/A", 1: "person", 2: "N/A"}) == {1: "person"}


def colour_namer(folder: Path, batch_size: int = 8) -> ColourNamer:
    return ColourNamer(ClipEmbedder(str(folder / "clip"), DEVICE), batch_size)


def crops(images: Images) -> list[Image.Image]:
    """Of different sizes and forms."""
    return [Image.fromarray(image[4 * i :, : 20 + 7 * i]) for i, image in enumerate(images)]


def test_colours_are_those_of_clips_logits(folder: Path, images: Images) -> None:
    """The three captions of a colour are averaged as unit vectors."""
    model = transformers.CLIPModel.from_pretrained(folder / "clip").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "clip")
    processor = transformers.CLIPImageProcessor.from_pretrained(folder / "clip")
    names = ["cat", "dog", "cat", "couch", "dog"]
    namer = colour_namer(folder)
    cosines = namer.cosines(crops(images), names)
    assert cosines.shape == (len(names), len(COLOURS))
    for row, crop, name in zip(cosines, crops(images), names, strict=True):
        texts = [caption.format(colour=colour, name=name) for colour in COLOURS for caption in CAPTIONS]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=TEXT_LENGTH, return_tensors="pt")
        with torch.no_grad():
            theirs = model(**tokens, **processor(images=[crop], return_tensors="pt"))
        length = theirs.text_embeds.unflatten(0, (10, 3)).mean(1).norm(dim=-1)
        logits = theirs.logits_per_image[0].unflatten(0, (10, 3)).mean(1) / length
        assert (row * model.logit_scale.exp().item()).tolist() == pytest.approx(logits.tolist(), abs=1e-3)
        assert namer.name([crop], [name]) == [COLOURS[int(logits.argmax())]]
    assert cosines.std(dim=1).min() > 1e-3


def test_genevals_captions_are_used() -> None:
    texts = [caption.format(colour="red", name="car") for caption in CAPTIONS]
    assert texts == ["a photo of a red car", "a photo of a red-colored car", "a photo of a red object"]


def test_a_colour_does_not_depend_on_the_batch(folder: Path, images: Images) -> None:
    names = ["cat", "dog", "cat", "couch", "dog"]
    together = colour_namer(folder).cosines(crops(images), names)
    apart = colour_namer(folder, batch_size=2).cosines(crops(images), names)
    assert torch.allclose(together, apart, atol=1e-5)
    assert colour_namer(folder).name([], []) == []


def test_an_object_is_cut_out_with_grey_around_it() -> None:
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    mask = np.array([[True, False, True], [False, True, True]])
    part = np.asarray(cut_out(image, Detection("cat", "", (2, 3, 5, 5), 0.9, mask)))
    assert part.shape == (2, 3, 3)
    assert (part[mask] == image[3:5, 2:5][mask]).all()
    assert (part[~mask] == GREY).all()


@pytest.mark.parametrize(
    ("box", "rows", "columns"),
    [
        ((1.6, 2.4, 4.4, 5.6), slice(2, 6), slice(2, 4)),
        ((-3.0, -0.7, 20.0, 30.0), slice(0, 6), slice(0, 8)),
        ((4.1, 3.1, 4.2, 3.2), slice(3, 4), slice(4, 5)),
        ((8.0, 6.0, 8.0, 6.0), slice(5, 6), slice(7, 8)),
        ((-9.0, -9.0, -5.0, -5.0), slice(0, 1), slice(0, 1)),
    ],
    ids=["between pixels", "over the edge", "smaller than a pixel", "at the corner", "outside"],
)
def test_any_box_gives_a_picture(box: tuple[float, float, float, float], rows: slice, columns: slice) -> None:
    image = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    assert (np.asarray(cut_out(image, Detection("cat", "", box, 0.9))) == image[rows, columns]).all()


PAINT = {"red": (220, 20, 20), "blue": (20, 20, 220), "green": (20, 200, 20), "black": (0, 0, 0)}
SIZE = 64


class GivenFinder:
    """Finds what it was given."""

    names = geneval_names(dict(enumerate(ALL_NAMES)))

    def __init__(self, found: Sequence[list[Detection]]) -> None:
        self.found = list(found)

    def find(self, images: Images, threshold: float) -> list[list[Detection]]:
        given, self.found = self.found[: len(images)], self.found[len(images) :]
        return [[o for o in objects if o.confidence > threshold] for objects in given]


class PaintNamer:
    """Names the paint of a cut-out's middle, and counts how often it is asked."""

    asked = 0

    def name(self, pictures: Sequence[Image.Image], names: Sequence[str]) -> list[str]:
        self.asked += len(pictures)
        shades = [np.asarray(p)[p.height // 2, p.width // 2] for p in pictures]
        return [min(PAINT, key=lambda c: float(np.abs(np.array(PAINT[c]) - shade).sum())) for shade in shades]


Thing = tuple[str, str, float, float, float]
"""Name, colour, centre, confidence."""


def scores_of(scenes: Sequence[list[Thing]], wanted: Sequence[dict[str, Any]], credit: str) -> list[float]:
    images = np.full((len(scenes), SIZE, SIZE, 3), 240, dtype=np.uint8)
    found = []
    for image, things in zip(images, scenes, strict=True):
        found.append([])
        for name, colour, x, y, confidence in things:
            left, top = int(x) - 6, int(y) - 6
            image[top : top + 12, left : left + 12] = PAINT[colour]
            found[-1].append(Detection(name, "", (left, top, left + 12, top + 12), confidence, np.ones((12, 12), bool)))
    reward = GenEval(detector="photo", credit=credit)
    assert isinstance(reward.detector, PhotoDetector)
    reward.detector._finder, reward.detector._colours = GivenFinder(found), PaintNamer()
    prompts = [Prompt(i, "x", "s", metadata) for i, metadata in enumerate(wanted)]
    return list(reward.score(RewardBatch(images, prompts)))


def entry(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


WANTED: dict[str, dict[str, Any]] = {
    "single_object": {"include": [entry("bench")]},
    "two_object": {"include": [entry("bench"), entry("tv remote")]},
    "counting": {"include": [entry("clock", 2)], "exclude": [entry("clock", 3)]},
    "colors": {"include": [entry("car", color="red")]},
    "position": {"include": [entry("kite"), entry("dog", position=["above", 0])]},
    "color_attr": {"include": [entry("bus", color="green"), entry("apple", color="black")]},
}
"""As in GenEval's evaluation_metadata.jsonl."""
CLOCKS: list[Thing] = [("clock", "red", x, 30, 0.95) for x in (10, 30, 50)]
TASKS: list[tuple[str, list[Thing], float, float]] = [
    ("single_object", [("bench", "red", 30, 30, 0.31)], 1, 1),
    ("single_object", [("bench", "red", 30, 30, 0.29)], 0, 0),
    ("single_object", [("bench", "red", 10, 30, 0.8), ("bench", "red", 50, 30, 0.8)], 1, 0),
    ("two_object", [("bench", "red", 10, 30, 0.8), ("tv remote", "blue", 50, 30, 0.5)], 1, 1),
    ("two_object", [("bench", "red", 10, 30, 0.8), ("cell phone", "blue", 50, 30, 0.9)], 1 / 2, (1 + 0) / 2),
    ("two_object", [("tv remote", "blue", 50, 30, 0.9)], 0, (0 + 1) / 2),
    ("counting", CLOCKS[:2], 1, 1),
    ("counting", [*CLOCKS[:2], ("clock", "red", 50, 30, 0.89)], 1, 1),
    ("counting", CLOCKS, 1 / 2, 1 / 2),
    ("counting", [CLOCKS[0], ("clock", "red", 50, 30, 0.89)], 0, 1 / 2),
    ("colors", [("car", "red", 30, 30, 0.5)], 1, 1),
    ("colors", [("car", "red", 10, 30, 0.9), ("car", "blue", 50, 30, 0.5)], 1, (0 + 0) / 2),
    ("colors", [("car", "red", 10, 30, 0.5), ("car", "blue", 50, 30, 0.9)], 1 / 2, (0 + 0) / 2),
    ("colors", [("bus", "red", 10, 30, 0.5)], 0, 0),
    ("position", [("kite", "red", 30, 50, 0.5), ("dog", "red", 30, 10, 0.5)], 1, 1),
    ("position", [("kite", "red", 30, 10, 0.5), ("dog", "red", 30, 50, 0.5)], 2 / 3, (1 + 1 + 0 + 1) / 4),
    ("position", [("kite", "red", 10, 30, 0.5), ("dog", "red", 50, 30, 0.5)], 2 / 3, (1 + 1 + 0 + 1) / 4),
    ("position", [("dog", "red", 30, 10, 0.5)], 0, (0 + 1 + 0) / 3),
    ("position", [("kite", "red", 30, 50, 0.5)], 1 / 3, (1 + 0 + 0) / 3),
    ("color_attr", [("bus", "green", 10, 30, 0.5), ("apple", "black", 50, 30, 0.5)], 1, 1),
    ("color_attr", [("bus", "black", 10, 30, 0.5), ("apple", "green", 50, 30, 0.5)], 1 / 4, (1 + 0 + 1 + 0) / 4),
    ("color_attr", [("bus", "green", 10, 30, 0.5), ("apple", "green", 50, 30, 0.5)], 3 / 4, (1 + 1 + 1 + 0) / 4),
    ("color_attr", [("bus", "green", 10, 30, 0.5)], 2 / 4, (1 + 1 + 0 + 0) / 4),
]
"""The task, what is there, the partial credit, the dense credit."""


def test_the_six_tasks_right_and_wrong() -> None:
    wanted = [{"tag": task, **WANTED[task]} for task, _, _, _ in TASKS]
    scenes = [things for _, things, _, _ in TASKS]
    shares = [share for _, _, share, _ in TASKS]
    assert scores_of(scenes, wanted, "dense") == pytest.approx([dense for _, _, _, dense in TASKS])
    assert scores_of(scenes, wanted, "partial") == pytest.approx(shares)
    assert scores_of(scenes, wanted, "strict") == [float(share == 1) for share in shares]
    assert scores_of(scenes[::-1], wanted[::-1], "partial") == pytest.approx(shares[::-1])


def test_only_colours_that_are_asked_for_are_named() -> None:
    detector = PhotoDetector()
    detector._finder, namer = GivenFinder([]), PaintNamer()
    detector._colours = namer
    image = np.zeros((1, SIZE, SIZE, 3), dtype=np.uint8)
    image[0, 20:40, 20:40] = PAINT["red"]
    cars = [Detection("car", "", (20, 20, 40, 40), confidence) for confidence in (0.4, 0.9, 0.5)]
    bench = Detection("bench", "", (0, 0, 9, 9), 0.9)
    wanted = {"include": [entry("car", color="blue"), entry("bench")]}
    (found,) = detector.attend(image, [[*cars, bench]], [wanted])
    assert namer.asked == 1
    assert [o.colour for o in found] == ["", "red", "", ""]


def test_the_surest_of_a_class_are_kept() -> None:
    detector = PhotoDetector(max_objects=2)
    cars = [Detection("car", "", (i, 0, i + 9, 9), 0.5 + i / 100) for i in range(4)]
    detector._finder = GivenFinder([[*cars, Detection("bus", "", (0, 0, 9, 9), 0.31)]])
    (found,) = detector.detect(np.zeros((1, 8, 8, 3), dtype=np.uint8))
    assert [(o.name, o.box[0]) for o in found] == [("car", 3), ("car", 2), ("bus", 0)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"include": [entry("mouse")]}, r"'mouse'.*does not know.*computer mouse"),
        ({"include": [entry("dog")], "exclude": [entry("marble")]}, r"'marble'.*does not know"),
        ({"include": [entry("dog", color="mauve")]}, r"'mauve'.*red, orange"),
    ],
)
def test_what_cannot_be_found_is_an_error_not_a_0(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scores_of([[]], [asked], "strict")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"detector": "photo", "modle": "x"},
            r"modle: unknown key 'modle'.*Did you mean 'model'.*Valid: .*detector, credit",
        ),
        ({"detector": "mini", "model": "x"}, r"model: unknown key 'model'\. .*Valid: halo, detector, credit$"),
        ({"detector": "photo", "threshold": 30}, r"threshold: .*less than or equal to 1, got 30"),
        ({"detector": "photo", "counting_threshold": -1}, r"counting_threshold: .*got -1"),
        ({"detector": "photo", "batch_size": 0}, r"batch_size: .*greater than 0, got 0"),
        ({"detector": "photo", "side": 0}, r"side: .*equal to 32, got 0"),
        ({"detector": "photo", "side": 100}, r"side: .*multiple of 32, got 100"),
        ({"detector": "photo", "max_objects": 0}, r"max_objects: .*greater than 0, got 0"),
    ],
)
def test_bad_params_are_refused_before_anything_is_loaded(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r"\(objects\)\.params\." + message):
        build_rewards([RewardConfig(type="geneval", name="objects", params=params)])


class AnySettings(GivenFinder):
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def test_a_detector_of_ones_own_gets_its_settings() -> None:
    reward = GenEval(detector=f"{__name__}:AnySettings", credit="partial", sharpness=3)
    assert isinstance(reward.detector, AnySettings)
    assert reward.detector.settings == {"sharpness": 3}


@pytest.mark.parametrize("key", ["model", "colour_model"])
@pytest.mark.parametrize("missing", ["nobody/nothing", "./nowhere"])
def test_a_missing_checkpoint_is_explained(folder: Path, key: str, missing: str) -> None:
    there = {"model": str(folder / "detr"), "colour_model": str(folder / "clip")}
    said = {
        "nobody/nothing": "a .* of 'nobody/nothing' is neither here",
        "./nowhere": "no such folder or file: ./nowhere",
    }
    with pytest.raises(InputError, match=rf"'objects' cannot be loaded.* {key}: {said[missing]}"):
        loaded(detector="photo", **{**there, key: missing})


def test_a_model_that_detects_nothing_is_explained(folder: Path) -> None:
    with pytest.raises(InputError, match=r" model: .*clip does not hold a detector"):
        loaded(detector="photo", model=str(folder / "clip"), colour_model=str(folder / "clip"))


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_backbone_that_needs_another_package_names_it(folder: Path, tmp_path: Path) -> None:
    """As facebook/detr-resnet-50 does."""
    transformers.DetrConfig().save_pretrained(tmp_path)
    model, _ = detr()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"(?s) model: .* needs a package that is not installed: .*timm"):
        loaded(detector="photo", model=str(tmp_path), colour_model=str(folder / "clip"))
