"""Our own variants of MARBLE, which the paper does not have, each judged against MARBLE as in the paper."""

from __future__ import annotations

from tools.study.claims import Claim, better, judged
from tools.study.findings import Study

OURS = {
    "marble_alpha_over_norm": "between refreshes, coefficients over cached gradient norms",
    "unit_mean": "equal coefficients over gradient norms, no QP",
    "min_variance": "the QP on the advantages' correlations, no gradient per reward",
    "marble_smooth_every_step": "the QP in every step, on products smoothed over as many steps as in the paper",
    "marble_gram": "products of gradients are smoothed, not solutions",
    "marble_noise_aware": "the QP on what is not noise",
    "marble_adam_metric": "the QP in the metric of the optimizer's step",
}
"""Variants that the paper does not have."""
REMOVED = ("marble_smooth_every_step", "marble_gram", "marble_noise_aware", "marble_adam_metric")
"""Those that improved nothing: `marble compare` no longer has them. Their results are kept and shown."""


def with_note(method: str) -> str:
    """The method's name in a table."""
    return f"{method} (removed)" if method in REMOVED else method


def judge_ours(study: Study) -> list[dict[str, str]]:
    """Each variant of ours against MARBLE as in the paper."""
    removed = {name: " (removed)" if name in REMOVED else "" for name in OURS}
    claims = [Claim(f"`{name}`{removed[name]}: {about}", "", better(name, "marble")) for name, about in OURS.items()]
    return [judged(claim, study) for claim in claims]
