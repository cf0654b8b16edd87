"""Balancing rules by their `type`. To add one: one file in this folder and one line here, or an import path in the
config (docs/adding_a_rule.md)."""

from __future__ import annotations

from marble_rl.balancing.base import Balancer
from marble_rl.plugins import Registry

RULES: Registry[Balancer] = Registry(
    section="balance",
    kind=Balancer,
    default="marble",
    built_in={
        "marble": "marble_rl.balancing.marble:Marble",
        "fair": "marble_rl.balancing.fair:Fair",
        "weighted_sum": "marble_rl.balancing.weighted_sum:WeightedSum",
        "fixed": "marble_rl.balancing.fixed:Fixed",
        "unit_mean": "marble_rl.balancing.unit_mean:UnitMean",
        "gdpo": "marble_rl.balancing.gdpo:Gdpo",
        "single": "marble_rl.balancing.single:Single",
        "sequential": "marble_rl.balancing.sequential:Sequential",
        "dropout": "marble_rl.balancing.dropout:Dropout",
        "min_variance": "marble_rl.balancing.min_variance:MinVariance",
        "marble_no_norm": "marble_rl.balancing.marble_no_norm:MarbleNoNorm",
    },
)
