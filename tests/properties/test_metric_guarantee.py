"""The min-norm guarantee in the optimizer's metric, whatever the gradients and the second moments are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inputs import MATRICES
from marble_rl.balancing.harmonizer import common_direction
from marble_rl.gradients.products import gram

EPS = st.sampled_from([1e-8, 1e-15, 1e-3])
MOMENTS = st.lists(
    st.sampled_from([0.0, 1e-38, 1e-30, 1e-16, 1e-8, 1.0, 1e8, 1e30]), min_size=1, max_size=8
)  # repeated over the parameters: AdamW's v in float32, zero where there was never a gradient


@pytest.mark.parametrize("name", MATRICES)
@settings(deadline=None, derandomize=True, max_examples=8)
@given(moments=MOMENTS, eps=EPS)
def test_the_step_is_good_for_every_reward(name, moments, eps):
    """cos_P(d, g_k) >= ||d*||_P for each reward with a gradient: so the loss of none rises along -P^-1 d."""
    g = MATRICES[name]
    v = torch.tensor(moments, dtype=torch.float32).repeat(g.shape[1])[: g.shape[1]]
    p = v.sqrt() + eps
    found = common_direction(gram(g, p))
    assert torch.isfinite(found.weights).all()
    if not found.active.any() or found.stationary:
        assert (found.weights == 0).all()
        return
    root = np.sqrt(p.double().numpy())
    rows = g.numpy()[found.active.numpy()] / root
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    d = (found.weights.numpy() @ g.numpy()) / root
    cosines = rows @ d / np.linalg.norm(d)
    assert cosines.min() >= found.norm - 1e-7
    assert cosines.min() > 0
