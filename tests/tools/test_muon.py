"""The optimizer of the mini pipeline's matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tools.mini.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 16), (2, 16, 4)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonal(matrices)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3
    assert values.max() < 1.3
    alike = torch.nn.functional.cosine_similarity(found.flatten(1), (u @ v).flatten(1))
    assert alike.min() > 0.95


def test_scale_of_the_gradient_does_not_matter() -> None:
    matrix = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonal(matrix), orthogonal(1000 * matrix), atol=1e-4, rtol=1e-4)


def test_it_learns_a_linear_map() -> None:
    dice = torch.Generator().manual_seed(2)
    x, target = torch.randn(64, 12, generator=dice), torch.randn(12, 7, generator=dice)
    weight, unused = nn.Parameter(torch.zeros(12, 7)), nn.Parameter(torch.zeros(12, 7))
    optimizer = Muon([weight, unused], lr=0.1)
    losses = []
    for _ in range(150):
        loss = ((x @ weight - x @ target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    assert not unused.any()
