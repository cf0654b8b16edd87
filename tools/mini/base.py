"""The mini pipeline's transformer and text encoders, trained together by flow matching on captioned latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from marble_rl.mini.shapes import SIZE
from marble_rl.seeding import generator
from tools.mini.autoencoder import FACTOR, LATENT_CHANNELS
from tools.mini.muon import Muon
from tools.mini.schedule import warm_up_and_fall
from tools.mini.tokenizers import clip_tokenizer, t5_tokenizer, token_ids
from tools.mini.training import Average, Resumable, stateful

TEXT_LENGTH = 14
"""Tokens that each text encoder gets; no caption of the world is longer than 12."""
WIDTH = 96
CLIP_WIDTH = WIDTH // 2
EMA_DECAY = 0.99


@dataclass
class TextEncoder:
    """A text encoder with its tokenizer."""

    model: Any
    tokenizer: Any

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """[B, TEXT_LENGTH]"""
        return token_ids(self.tokenizer, captions, TEXT_LENGTH)


class Captioned(nn.Module, ABC):
    """The parts of a pipeline that flow matching trains: text encoders and transformer."""

    @abstractmethod
    def tokens(self, captions: Sequence[str]) -> Tensor:
        """[B, ...]: ids of the captions"""

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, tokens: Tensor) -> Tensor:
        """As in the pipeline."""


class Base(Captioned):
    """The parts of the pipeline that are trained on captions: text encoders and transformer."""

    def __init__(self, seed: int, layers: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.clips = [_clip(), _clip()]
            self.t5 = _t5()
            self.transformer = _transformer(layers)
        self.modules_ = nn.ModuleList([*(clip.model for clip in self.clips), self.t5.model, self.transformer])

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """[B, 2, TEXT_LENGTH]: both tokenizers' ids (the two CLIP encoders share theirs)."""
        return torch.stack([self.clips[0].tokens(captions), self.t5.tokens(captions)], dim=1)

    def velocity(self, x: Tensor, sigma: Tensor, tokens: Tensor) -> Tensor:
        """As in the pipeline: CLIP states side by side, padded to T5's width, followed by the T5 states."""
        clip_ids, t5_ids = tokens[:, 0], tokens[:, 1]
        outputs = [clip.model(clip_ids, output_hidden_states=True) for clip in self.clips]
        clip_states = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        t5_states = self.t5.model(t5_ids)[0]
        clip_states = nn.functional.pad(clip_states, (0, t5_states.shape[-1] - clip_states.shape[-1]))
        prediction: Tensor = self.transformer(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=torch.cat([clip_states, t5_states], dim=1),
            pooled_projections=torch.cat([output.text_embeds for output in outputs], dim=-1),
            return_dict=False,
        )[0]
        return prediction


def train_base(
    base: Captioned,
    latents: Tensor,
    captions: Sequence[str],
    training: Resumable,
    *,
    steps: int,
    batch: int,
    seed: int,
    lr: float = 3e-3,
) -> None:
    """Flow matching with logit-normal times, as for SD3. At the end ``base`` holds the EMA of its weights."""
    base.train()
    tokens = base.tokens(captions)
    parameters = [p for p in base.parameters() if p.requires_grad]
    average = Average(parameters, EMA_DECAY)
    matrices, others = _by_kind(base)
    optimizers = [Muon(matrices, lr=lr), torch.optim.AdamW(others, lr=lr / 2, weight_decay=1e-2, betas=(0.9, 0.98))]
    schedules = [warm_up_and_fall(optimizer, steps) for optimizer in optimizers]
    for step in training.steps(steps, stateful({"base": base, "average": average}, optimizers, schedules)):
        dice = generator(seed, "base", step)
        rows = torch.randint(len(latents), (batch,), generator=dice)
        x0 = latents[rows]
        noise = torch.randn(x0.shape, generator=dice)
        sigma = torch.sigmoid(torch.randn(batch, generator=dice) + 0.3)
        t = sigma.view(-1, *[1] * (x0.ndim - 1))
        v = base.velocity((1 - t) * x0 + t * noise, sigma, tokens[rows])
        loss = ((v - (noise - x0)) ** 2).mean()
        base.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        average.update(step)
        training.show(step, loss.item())
    average.copy_to_parameters()
    base.eval()


def _by_kind(base: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices between hidden layers, for Muon; and the rest, for AdamW: embeddings, biases, norms, the last layer."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in base.named_parameters():
        outer = any(word in name for word in ("embed", "shared", "relative", "proj_out"))
        (others if parameter.ndim != 2 or outer else matrices).append(parameter)
    return matrices, others


def _clip() -> TextEncoder:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    tokenizer = clip_tokenizer(TEXT_LENGTH)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return TextEncoder(CLIPTextModelWithProjection(config), tokenizer)


def _t5() -> TextEncoder:
    from transformers import T5Config, T5EncoderModel

    tokenizer = t5_tokenizer(TEXT_LENGTH)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=WIDTH, d_kv=24, d_ff=WIDTH, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return TextEncoder(T5EncoderModel(config), tokenizer)


def _transformer(layers: int) -> Any:
    from diffusers import SD3Transformer2DModel

    side = SIZE // FACTOR
    return SD3Transformer2DModel(
        sample_size=side,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=layers,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        caption_projection_dim=WIDTH,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=side // 2,
        qk_norm="rms_norm",
    )
