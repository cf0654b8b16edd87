"""Randomness from names, not from history.

Every random number is drawn from a generator seeded by (run seed, purpose, indices). Nothing depends on how many
numbers were drawn before, on which rank draws them, or on whether the run was interrupted. So a resumed run equals the
uninterrupted one, and two ranks compute what one does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive_seed(0, "rollout", step, group, sample)``."""
    text = "/".join([str(seed), purpose, *map(str, indices)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, purpose: str, *indices: int) -> torch.Generator:
    """A CPU generator for one purpose. Draw on the CPU and move the result: so it is the same for every device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *indices))


def normal_rows(generators: Iterable[torch.Generator], shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal noise [B, *shape], row i drawn from the i-th generator alone."""
    return torch.stack([torch.randn(shape, generator=g) for g in generators])
