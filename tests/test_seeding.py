"""Seeds depend on every part of their name and on nothing else."""

from __future__ import annotations

import torch

from marble_rl.seeding import derive_seed, generator, normal_rows


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    seeds = [derive_seed(*parts) for parts in ((0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1))]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(0, "a", 11) != derive_seed(0, "a", 1, 1)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    rows = normal_rows([generator(0, "x", i) for i in range(3)], (2, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(rows[1], normal_rows([generator(0, "x", 1)], (2, 2))[0])
