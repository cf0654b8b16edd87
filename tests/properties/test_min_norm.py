"""The min-norm point (docs/method.md, section 3, step 4) on hostile inputs, against solvers of another kind."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inputs import MATRICES, STATIONARY, UNIT_MATRICES, unit_rows
from marble_rl import min_norm
from reference import optimality_gap, simplex_qp

TINY = 1e-6


def names(matrices, most=64):
    return [name for name, g in matrices.items() if len(g) <= most]


def on_simplex(alpha, tolerance=1e-12):
    return bool((alpha >= 0).all()) and abs(float(alpha.sum()) - 1) < tolerance


def scrambled(k):
    return torch.randperm(k, generator=torch.Generator().manual_seed(k))


@pytest.mark.parametrize("name", names(UNIT_MATRICES))
def test_optimal(name):
    unit = UNIT_MATRICES[name]
    gram = unit @ unit.T
    found = min_norm(gram)
    assert on_simplex(found.alpha)
    assert optimality_gap(gram, found.alpha) < 1e-9
    direction = found.alpha @ unit
    assert found.norm == pytest.approx(float(direction.norm()), abs=1e-7)
    assert 0 <= found.kkt_residual < 1e-12


@pytest.mark.parametrize("name", names(UNIT_MATRICES, most=7))
def test_matches_every_support_tried(name):
    unit = UNIT_MATRICES[name]
    gram = unit @ unit.T
    alpha, value = simplex_qp(gram)
    found = min_norm(gram)
    assert float(found.alpha @ gram @ found.alpha) == pytest.approx(value, abs=1e-9)
    # The point itself is unique, its coefficients need not be.
    torch.testing.assert_close(found.alpha @ unit, torch.from_numpy(alpha) @ unit, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", names(UNIT_MATRICES))
def test_serves_every_reward(name):
    unit = UNIT_MATRICES[name]
    direction = min_norm(unit @ unit.T).alpha @ unit
    length = float(direction.norm())
    assert (length < TINY) == (name in STATIONARY)
    if length >= TINY:
        assert float((unit @ direction).min()) / length >= length - 1e-9


@pytest.mark.parametrize("name", ["orthogonal", "ring", "opposed pair", "one dominated", "all the same"])
def test_known_solutions(name):
    expected = {"orthogonal": 0.5, "ring": 0.0, "opposed pair": 0.0, "one dominated": 0.3 / math.sqrt(1.09)}
    unit = UNIT_MATRICES[name]
    assert min_norm(unit @ unit.T).norm == pytest.approx(expected.get(name, 1.0), abs=1e-7)


@pytest.mark.parametrize("name", names(MATRICES))
def test_raw_gram(name):
    """Without normalisation: still on the simplex, and optimal relative to the mean squared norm."""
    g = MATRICES[name]
    gram = g @ g.T
    found = min_norm(gram)
    scale = float(gram.diagonal().mean())
    assert on_simplex(found.alpha)
    assert optimality_gap(gram, found.alpha) <= 1e-9 * scale
    assert math.isfinite(found.norm)
    assert 0 <= found.kkt_residual < 1e-12
    exact = float((found.alpha @ g).norm())
    assert found.norm == pytest.approx(exact, abs=1e-7 * math.sqrt(scale))


def test_shortest_gradient_wins_where_it_lies_before_the_others():
    gram = torch.tensor([[1.0, 3.0], [3.0, 10.0]], dtype=torch.float64)
    found = min_norm(gram)
    assert found.alpha.tolist() == [1.0, 0.0]
    assert found.norm == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("factor", [1.0, 1e-12, 1e12])
def test_kkt_residual_follows_its_definition(factor):
    """Zero at an optimum, so the definition shows only on a matrix that is not a Gram matrix."""
    gram = factor * torch.tensor([[1.0, -2.0], [-2.0, 3.0]], dtype=torch.float64)
    found = min_norm(gram)
    slope = gram @ found.alpha
    expected = float(found.alpha @ slope - slope.min()) / float(gram.diagonal().mean())
    assert expected > 1e-3
    assert found.kkt_residual == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", names(UNIT_MATRICES))
def test_order_does_not_matter(name):
    unit = UNIT_MATRICES[name]
    order = scrambled(len(unit))
    gram = unit @ unit.T
    first, second = min_norm(gram), min_norm(gram[order][:, order])
    torch.testing.assert_close(first.alpha @ unit, second.alpha @ unit[order], rtol=0, atol=1e-6)
    if torch.linalg.cond(gram) < 1e6:
        torch.testing.assert_close(first.alpha[order], second.alpha, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", names(UNIT_MATRICES))
@pytest.mark.parametrize("factor", [1e-20, 1e30])
def test_scale_does_not_matter(name, factor):
    unit = UNIT_MATRICES[name]
    gram = unit @ unit.T
    plain, scaled = min_norm(gram), min_norm(factor * gram)
    torch.testing.assert_close(plain.alpha @ unit, scaled.alpha @ unit, rtol=0, atol=1e-6)
    assert scaled.norm == pytest.approx(math.sqrt(factor) * plain.norm, rel=1e-6, abs=1e-7 * math.sqrt(factor))


@pytest.mark.parametrize("name", ["five rewards", "duplicates", "64 rewards", "opposed pair"])
def test_same_input_same_answer(name):
    gram = MATRICES[name] @ MATRICES[name].T
    before = gram.clone()
    assert torch.equal(min_norm(gram).alpha, min_norm(gram).alpha)
    assert torch.equal(gram, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_answers_in_the_dtype_given(dtype):
    found = min_norm(torch.diag(torch.tensor([1.0, 2.0, 4.0, 4.0])).to(dtype))
    assert found.alpha.dtype == dtype
    assert found.alpha.tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=1e-12 + torch.finfo(dtype).eps / 4)
    assert found.norm == pytest.approx(math.sqrt(0.5), rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (1, 0)])
def test_non_finite_gram_is_refused(value, place):
    gram = torch.eye(3)
    gram[place] = value
    with pytest.raises(ValueError, match="gram"):
        min_norm(gram)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 0), (2, 2, 2), ()])
def test_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match="gram"):
        min_norm(torch.ones(shape))


ENTRIES = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0]), st.floats(-1, 1, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-6)
)


@st.composite
def gradients(draw, most=6):
    k, p = draw(st.integers(1, most)), draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(ENTRIES, min_size=p, max_size=p), min_size=k, max_size=k))
    return torch.tensor(rows, dtype=torch.float64)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(gradients())
def test_any_small_problem(g):
    unit = unit_rows(g)
    if len(unit) == 0:
        assert min_norm(g @ g.T).alpha.tolist() == pytest.approx([1 / len(g)] * len(g))
        return
    gram = unit @ unit.T
    found = min_norm(gram)
    assert on_simplex(found.alpha)
    assert found.norm**2 == pytest.approx(simplex_qp(gram)[1], abs=1e-9)
    assert optimality_gap(gram, found.alpha) < 1e-9
    if found.norm > TINY:
        direction = (found.alpha @ unit).numpy()
        assert np.min(unit.numpy() @ direction) / np.linalg.norm(direction) >= found.norm - 1e-9


def test_identical_gradients_share_their_weight_evenly():
    """d* is unique, alpha is not: the most even one, whatever the order."""
    g = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    assert min_norm(g @ g.T).alpha.tolist() == pytest.approx([1 / 6, 1 / 2, 1 / 6, 1 / 6], abs=1e-6)
    assert min_norm(torch.ones(5, 5)).alpha.tolist() == pytest.approx([0.2] * 5, abs=1e-7)


def test_an_integer_gram_is_answered_in_float64():
    assert min_norm(torch.eye(2, dtype=torch.int64)).alpha.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("seed", "k", "size"),
    [(768976903, 6, 12), (131899201, 6, 12), (48039879, 5, 10), (304775970, 5, 10), (315070590800, 8, 16)],
)
def test_duplicates_on_which_nnls_stops_too_early(seed, k, size):
    """Found by fuzzing: in the given order scipy's NNLS ends at residuals of 1e-2 on these."""
    dice = np.random.default_rng(seed)
    g = dice.standard_normal((k, size))[dice.integers(0, k, k)]
    g /= np.linalg.norm(g, axis=1, keepdims=True)
    assert min_norm(torch.tensor(g @ g.T)).kkt_residual < 1e-12
