"""The nearest matrix of products that gradients can have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marble_rl.balancing.nearest_gram import nearest_gram

K = 3


def unit_gram(seed: int) -> Tensor:
    g = torch.randn(K, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.4
    g = g / g.norm(dim=1, keepdim=True)
    return g @ g.T


@pytest.mark.parametrize("fine", [unit_gram(4), torch.ones(3, 3, dtype=torch.float64)], ids=["regular", "singular"])
def test_a_gram_matrix_is_returned_as_it_is(fine: Tensor) -> None:
    assert nearest_gram(fine) is fine


def test_the_nearest_gram_matrix() -> None:
    indefinite = torch.tensor([[1.0, 0.8, 0.8], [0.8, 1.0, 0.0], [0.8, 0.0, 1.0]], dtype=torch.float64)
    nearest = nearest_gram(indefinite)
    v = torch.tensor([-(2**0.5), 1.0, 1.0], dtype=torch.float64) / 2  # of the eigenvalue below 0
    torch.testing.assert_close(nearest, indefinite - (1 - 0.8 * 2**0.5) * torch.outer(v, v))
    assert torch.linalg.eigvalsh(nearest)[0] > -1e-12
