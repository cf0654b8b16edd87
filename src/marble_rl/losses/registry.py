"""Losses by their `type`. To add one: one file in this folder and one line here, or an import path in the config
(docs/adding_a_loss.md)."""

from __future__ import annotations

from marble_rl.losses.base import Loss
from marble_rl.plugins import Registry

LOSSES: Registry[Loss] = Registry(
    section="loss",
    kind=Loss,
    default="nft",
    built_in={
        "nft": "marble_rl.losses.nft:Nft",
        "awm": "marble_rl.losses.awm:Awm",
    },
)
