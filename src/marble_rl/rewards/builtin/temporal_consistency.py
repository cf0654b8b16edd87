"""How steady the picture is from frame to frame.

VBench's background consistency (https://arxiv.org/abs/2311.17982): with e_t the unit CLIP embedding of frame t of F,

    score = 1 / (F - 1) * sum over t = 2..F of (e_t . e_{t-1} + e_t . e_1) / 2

Neighbours show flicker and cuts, the first frame shows slow drift. VBench raises negative cosines to 0; here they
stay, so that of two bad videos the worse one scores lower.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from marble_rl.mini import embedded
from marble_rl.rewards.builtin.embedder import ClipEmbedder
from marble_rl.rewards.core.base import RewardBase, RewardBatch, Scores, Traits
from marble_rl.section import ModelPath, Section


class TemporalConsistency(RewardBase):
    """How steady a video's pictures are: cosines of CLIP embeddings between frames. A still video scores highest.

    A single frame gets no score.
    """

    class Params(Section):
        model: ModelPath = "openai/clip-vit-base-patch32"
        """Hub id or folder of a `CLIPModel` in transformers' format, or `mini`."""

    params: Params
    traits = Traits(range=(-1.0, 1.0), deterministic=True, media="video")
    _clip: ClipEmbedder

    def load(self, device: torch.device) -> None:
        self._clip = ClipEmbedder(embedded(self.params.model, "clipscore"), device)

    def score(self, batch: RewardBatch) -> Scores:
        # One video after the other: memory for one, and a score that does not depend on the rest of the batch.
        return [consistency(self._clip.images(video)) if len(video) > 1 else None for video in batch.images]


def consistency(embeddings: Tensor) -> float:
    """Of a video's frames [F, D], F > 1."""
    e = F.normalize(embeddings.cpu().double(), dim=-1)
    with_previous = (e[1:] * e[:-1]).sum(-1)
    with_first = (e[1:] * e[:1]).sum(-1)
    return float(((with_previous + with_first) / 2).mean().clamp(-1, 1))  # rounding may go beyond
