"""The mini world's reward models: small CLIP models with different training.

    clipscore   caption match: contrastive, against near misses of captions and of pictures
    pickscore   preference given the caption: right and clean before wrong or flawed
    hpsv2       quality: of two pictures of one caption, the one with fewer flaws
    aesthetic   quality without a caption (an MLP on the picture's embedding); evaluation-only

The last three start from the first, as PickScore, HPSv2 and the LAION predictor start from CLIP.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from marble_rl.mini.shapes import SIZE
from marble_rl.seeding import generator
from tools.mini.autoencoder import as_tensor
from tools.mini.corpus import Pictures
from tools.mini.flaws import with_flaws
from tools.mini.near_misses import near_miss
from tools.mini.render import render
from tools.mini.scenes import SOURCES, draw_scene
from tools.mini.schedule import rise_and_fall
from tools.mini.tokenizers import clip_tokenizer, token_ids

WIDTH = 96
TEXT_WIDTH = 64
TEXT_LENGTH = 16
WRONG_CAPTIONS = 3
SHARPNESS = 10.0
"""Scale of cosines in preferences: a difference of 0.4 is a preference with a probability of 98 %."""


@dataclass(frozen=True)
class Lessons:
    """Training data of the reward models: N captions, each with pictures that are to be ranked."""

    captions: tuple[str, ...]
    wrong_captions: tuple[tuple[str, ...], ...]
    """`WRONG_CAPTIONS` near misses of each caption"""
    right: Pictures
    """[N, 64, 64, 3]: what the caption says, without flaws"""
    wrong: Pictures
    """[N, 64, 64, 3]: a near miss, without flaws"""
    mild: Pictures
    """[N, 64, 64, 3]: right, with mild flaws"""
    bad: Pictures
    """[N, 64, 64, 3]: right, with worse flaws than `mild`"""
    severity: Tensor
    """[N, 2]: severity of the flaws of `mild` and `bad`, 0 to 1"""

    def __len__(self) -> int:
        return len(self.captions)


def make_lessons(count: int, seed: int) -> Lessons:
    """Draw scenes from all sources in turn, with near misses and flaws."""
    dice = random.Random(f"lessons/{seed}")
    captions, wrong_captions, severity = [], [], []
    pictures = np.empty((4, count, SIZE, SIZE, 3), dtype=np.uint8)
    for i in range(count):
        scene = draw_scene(SOURCES[i % len(SOURCES)], dice)
        misses = [near_miss(scene, dice) for _ in range(WRONG_CAPTIONS)]
        picture = render(scene, dice)
        little = dice.uniform(0.0, 0.6)
        much = dice.uniform(little + 0.2, 1.0)
        drawn = (picture, render(misses[0], dice), with_flaws(picture, little, dice), with_flaws(picture, much, dice))
        pictures[:, i] = np.stack([np.asarray(d) for d in drawn])
        captions.append(scene.caption)
        wrong_captions.append(tuple(miss.caption for miss in misses))
        severity.append((little, much))
    right, wrong, mild, bad = pictures
    return Lessons(tuple(captions), tuple(wrong_captions), right, wrong, mild, bad, torch.tensor(severity))


@dataclass(frozen=True)
class Samples:
    """Pictures that a model sampled for the first M captions of the lessons, and the same with added flaws."""

    drawn: Pictures
    """[M, 64, 64, 3]"""
    flawed: Pictures
    """[M, 64, 64, 3]"""


def with_further_flaws(drawn: Pictures, seed: int) -> Samples:
    dice = random.Random(f"samples/{seed}")
    flawed = [np.asarray(with_flaws(Image.fromarray(d), dice.uniform(0.1, 1.0), dice)) for d in drawn]
    return Samples(drawn, np.stack(flawed))


def new_scorer(seed: int) -> Any:
    """A `CLIPModel` for 64x64 pictures and the world's captions."""
    from transformers import CLIPConfig, CLIPModel

    tokenizer = clip_tokenizer(TEXT_LENGTH)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": TEXT_LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": 8,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=TEXT_WIDTH))


class Scorer(nn.Module):
    """A CLIP model with its tokenizer, for training."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip
        self.tokenizer = clip_tokenizer(TEXT_LENGTH)

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """[B, TEXT_LENGTH]"""
        return token_ids(self.tokenizer, captions, TEXT_LENGTH)

    def texts(self, tokens: Tensor) -> Tensor:
        """Unit embeddings [B, D]."""
        return F.normalize(self.clip.text_projection(self.clip.text_model(tokens).pooler_output), dim=-1)

    def images(self, pictures: Pictures) -> Tensor:
        """Unit embeddings [B, D]."""
        states = self.clip.vision_model(as_tensor(pictures)).pooler_output
        return F.normalize(self.clip.visual_projection(states), dim=-1)


OnStep = Callable[[int, float], None]


def train_caption_match(lessons: Lessons, *, steps: int, batch: int, seed: int, on_step: OnStep) -> Any:
    """Contrastive training in both directions: the right caption for a picture, and the right picture for a caption,
    among near misses."""
    scorer = Scorer(new_scorer(seed))
    right_tokens = scorer.tokens(lessons.captions)
    wrong_tokens = torch.stack([scorer.tokens(captions) for captions in zip(*lessons.wrong_captions, strict=True)], 1)

    def loss(rows: Tensor) -> Tensor:
        index = rows.numpy()
        pictures = np.concatenate([lessons.right[index], lessons.wrong[index], lessons.bad[index]])
        right, wrong, bad = scorer.images(pictures).chunk(3)
        captions = scorer.texts(right_tokens[rows])
        misses = scorer.texts(wrong_tokens[rows].flatten(0, 1)).view(len(rows), WRONG_CAPTIONS, -1)
        scale = scorer.clip.logit_scale.exp().clamp(max=50)
        # A caption may occur twice in a batch: the pictures of the other one are then not wrong.
        twice = (right_tokens[rows][:, None] == right_tokens[rows][None]).all(-1) & ~torch.eye(len(rows)).bool()
        across = (right @ captions.T).masked_fill(twice, -1)
        own = torch.arange(len(rows))
        find_caption = torch.cat([across, (right[:, None] * misses).sum(-1)], dim=1)
        hard = torch.stack([(wrong * captions).sum(-1), (bad * captions).sum(-1)], dim=1)
        find_picture = torch.cat([across.T, hard], dim=1)
        return F.cross_entropy(scale * find_caption, own) + F.cross_entropy(scale * find_picture, own)

    return _fit(scorer, loss, len(lessons), steps, batch, seed, 1e-3, on_step).clip


def train_preference(
    clip: Any,
    lessons: Lessons,
    samples: Samples,
    *,
    content: bool,
    steps: int,
    batch: int,
    seed: int,
    on_step: OnStep,
) -> Any:
    """Bradley-Terry on pairs of pictures for a caption, starting from ``clip``.

    A clean drawing is better than a model's sample, the sample is better than the same with flaws, and mild flaws are
    better than severe ones. With ``content`` a drawing of a near miss is worse than the right one (a preference for
    the caption). Without, it is as good, and better than any flawed picture (quality alone).
    """
    scorer = Scorer(copy.deepcopy(clip))
    tokens = scorer.tokens(lessons.captions)

    def loss(rows: Tensor) -> Tensor:
        index, drawn = rows.numpy(), rows.numpy() % len(samples.drawn)
        own = np.concatenate([lessons.right[index], lessons.wrong[index], lessons.mild[index], lessons.bad[index]])
        of_model = np.concatenate([samples.drawn[drawn], samples.flawed[drawn], lessons.right[drawn]])
        captions, model_captions = scorer.texts(tokens[rows]), scorer.texts(tokens[drawn])
        right, wrong, mild, bad = (scorer.images(own).view(4, len(rows), -1) * captions).sum(-1)
        sample, flawed, ideal = (scorer.images(of_model).view(3, len(rows), -1) * model_captions).sum(-1)
        better = [right, right, mild, ideal, sample]
        worse = [mild, bad, bad, sample, flawed]
        if content:
            better, worse = [*better, right], [*worse, wrong]
        else:
            better, worse = [*better, wrong, wrong], [*worse, mild, bad]
        margins = SHARPNESS * (torch.stack(better) - torch.stack(worse))
        alike = 0.0 if content else (SHARPNESS * (right - wrong)).square().mean()
        return F.softplus(-margins).mean() + alike

    return _fit(scorer, loss, len(lessons), steps, batch, seed, 5e-4, on_step).clip


class AestheticScorer(nn.Module):
    """A linear network in LAION's layout on a picture's embedding."""

    def __init__(self, clip: Any, seed: int) -> None:
        super().__init__()
        self.scorer = Scorer(copy.deepcopy(clip))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(TEXT_WIDTH, 16), nn.Linear(16, 1))

    def forward(self, pictures: Pictures) -> Tensor:
        """[B]"""
        score: Tensor = self.layers(self.scorer.images(pictures))[:, 0]
        return score


def train_aesthetic(
    clip: Any, lessons: Lessons, samples: Samples, *, steps: int, batch: int, seed: int, on_step: OnStep
) -> AestheticScorer:
    """Regression on marks from 0 to 10: 10 for any clean drawing, less for flaws by their severity."""
    model = AestheticScorer(clip, seed)

    def loss(rows: Tensor) -> Tensor:
        index, drawn = rows.numpy(), rows.numpy() % len(samples.drawn)
        clean, mild, bad = model(np.concatenate([lessons.right[index], lessons.mild[index], lessons.bad[index]])).chunk(
            3
        )
        sample, flawed = model(np.concatenate([samples.drawn[drawn], samples.flawed[drawn]])).chunk(2)
        marks = 8 - 8 * lessons.severity[rows]
        errors = torch.stack([clean - 10, mild - marks[:, 0], bad - marks[:, 1]])
        return errors.square().mean() / 10 + F.softplus(flawed - sample).mean() + F.softplus(sample - 8).mean()

    return cast(AestheticScorer, _fit(model, loss, len(lessons), steps, batch, seed, 5e-4, on_step))


def _fit(
    module: Any,
    loss_of: Callable[[Tensor], Tensor],
    count: int,
    steps: int,
    batch: int,
    seed: int,
    lr: float,
    on_step: OnStep,
) -> Any:
    """Train with AdamW and a one-cycle learning rate, on random rows."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=1e-2)
    schedule = rise_and_fall(optimizer, lr, steps)
    for step in range(steps):
        loss = loss_of(torch.randint(count, (batch,), generator=generator(seed, "scorer", step)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        on_step(step, loss.item())
    return module.eval()
