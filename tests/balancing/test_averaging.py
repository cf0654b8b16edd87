"""Products of unit gradients averaged over batches, and the nearest matrix that gradients can have."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from marble_rl.balancing.averaging import GramMemory, nearest_gram

K = 3


def unit_gram(seed: int) -> Tensor:
    g = torch.randn(K, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.4
    g = g / g.norm(dim=1, keepdim=True)
    return g @ g.T


def test_products_are_averaged_from_the_first_batch_on() -> None:
    memory = GramMemory(K, decay=0.6)
    everyone = torch.ones(K, dtype=torch.bool)
    mean = unit_gram(0)
    memory.add(unit_gram(0), None, everyone)
    for seed in range(1, 5):
        mean = 0.6 * mean + 0.4 * unit_gram(seed)
        memory.add(unit_gram(seed), 0.5 * unit_gram(seed), everyone)
    torch.testing.assert_close(memory.gram, mean)
    assert memory.known.all()


def test_a_reward_without_a_gradient_keeps_what_is_known_of_it() -> None:
    memory = GramMemory(K, decay=0.6)
    memory.add(unit_gram(1), None, torch.tensor([True, True, False]))
    assert memory.known.tolist() == [True, True, False]
    before = memory.gram.clone()
    memory.add(unit_gram(2), None, torch.tensor([False, True, True]))
    assert memory.gram[0, 1] == before[0, 1]
    assert memory.gram[2, 1] == unit_gram(2)[2, 1]
    assert memory.gram[0, 2].isnan(), "these two were never seen together"


def test_state_round_trip() -> None:
    memory, resumed = GramMemory(K, decay=0.6), GramMemory(K, decay=0.6)
    memory.add(unit_gram(1), unit_gram(2), torch.tensor([True, True, False]))
    resumed.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    for m in (memory, resumed):
        m.add(unit_gram(3), unit_gram(4), torch.ones(K, dtype=torch.bool))
    torch.testing.assert_close(resumed.gram, memory.gram, rtol=0, atol=0)
    torch.testing.assert_close(resumed.cross, memory.cross, rtol=0, atol=0)


@pytest.mark.parametrize("fine", [unit_gram(4), torch.ones(3, 3, dtype=torch.float64)], ids=["regular", "singular"])
def test_a_gram_matrix_is_returned_as_it_is(fine: Tensor) -> None:
    assert nearest_gram(fine) is fine


def test_the_nearest_gram_matrix() -> None:
    indefinite = torch.tensor([[1.0, 0.8, 0.8], [0.8, 1.0, 0.0], [0.8, 0.0, 1.0]], dtype=torch.float64)
    nearest = nearest_gram(indefinite)
    v = torch.tensor([-(2**0.5), 1.0, 1.0], dtype=torch.float64) / 2  # of the eigenvalue below 0
    torch.testing.assert_close(nearest, indefinite - (1 - 0.8 * 2**0.5) * torch.outer(v, v))
    assert torch.linalg.eigvalsh(nearest)[0] > -1e-12
