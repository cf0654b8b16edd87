"""Per-reward gradients against one hand-written autograd pass per column (docs/method.md, sections 3 and 6)."""

import pytest
import torch

from marble_rl import GradientAccumulator, reward_gradients
from marble_rl.gradients.halves import SAMPLED

N, J = 12, 4
METHODS = ["passes", "fused"]
SPLITS = {
    "none": None,
    "even": [0] * 6 + [1] * 6,
    "interleaved": [0, 1] * 6,
    "unequal": [0] * 3 + [1] * 9,
    "one against all": [1] + [0] * 11,
}
EXACT = {"rtol": 1e-11, "atol": 1e-14}


class Model:
    """A two-layer network whose outputs are the slope and base of a sample; one parameter is in neither."""

    def __init__(self, dtype=torch.float64, seed=0):
        source = torch.Generator().manual_seed(seed)
        self.params = [
            torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
            for shape in [(5, 3), (5,), (2, 2), (2, 5)]
        ]
        self.x = torch.randn(N, 3, generator=source, dtype=torch.float64).to(dtype)
        self.advantages = torch.randn(N, J, generator=source, dtype=torch.float64).to(dtype)

    def __call__(self, rows=slice(None)):
        first, bias, _unused, second = self.params
        hidden = torch.tanh(self.x[rows] @ first.T + bias)
        slope, base = (hidden @ second.T).T
        return slope**2 - slope, base**2

    def flat_gradient(self, value):
        found = torch.autograd.grad(value, self.params, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, found, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    def column(self, j, rows=slice(None)):
        """grad mean_i A_ij slope_i over the given rows."""
        return self.flat_gradient((self.advantages[rows, j] * self(rows)[0]).mean())


def as_halves(name):
    return None if SPLITS[name] is None else torch.tensor(SPLITS[name])


def halves_by_hand(model, halves):
    """[2][J][P]: the gradients of each half alone."""
    rows = [(halves == h).nonzero()[:, 0] for h in (0, 1)]
    return [[model.column(j, members) for j in range(model.advantages.shape[1])] for members in rows]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("split", SPLITS)
def test_matches_separate_passes(split, method):
    model = Model()
    halves = as_halves(split)
    slope, base = model()
    found = reward_gradients(slope, base, model.advantages, model.params, halves=halves, method=method)

    columns = [model.column(j) for j in range(J)]
    torch.testing.assert_close(found.g, torch.stack(columns), **EXACT)
    torch.testing.assert_close(found.shared, model.flat_gradient(model()[1].mean()), **EXACT)
    for j in range(J):
        assert float(found.norms[j]) == pytest.approx(float(columns[j].norm()), rel=1e-12)
        for k in range(J):
            assert float(found.gram[j, k]) == pytest.approx(float(columns[j] @ columns[k]), rel=1e-10, abs=1e-14)

    if halves is None:
        assert found.cross is None
        assert found.half_gram is None
        return
    h = halves_by_hand(model, halves)
    for j in range(J):
        for k in range(J):
            expected = float(h[0][j] @ h[1][k] + h[1][j] @ h[0][k]) / 2
            assert float(found.cross[j, k]) == pytest.approx(expected, rel=1e-10, abs=1e-14)
            for a in (0, 1):
                for b in (0, 1):
                    expected = float(h[a][j] @ h[b][k])
                    assert float(found.half_gram[a, b, j, k]) == pytest.approx(expected, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("method", METHODS)
def test_halves_average_to_the_whole(method):
    model = Model()
    halves = as_halves("even")
    slope, base = model()
    found = reward_gradients(slope, base, model.advantages, model.params, halves=halves, method=method)
    first, second = (torch.stack(h) for h in halves_by_hand(model, halves))
    torch.testing.assert_close(found.g, (first + second) / 2, **EXACT)


def test_the_sample_of_a_large_model_estimates_the_products_of_all_parameters():
    """Within the error of a sample of so many numbers, whatever the layers' shapes."""
    source = torch.Generator().manual_seed(0)
    weights = [torch.zeros(shape, requires_grad=True) for shape in [(16, 320), (640, 16), (16, 77)]]
    common = torch.randn(1, sum(w.numel() for w in weights), generator=source)
    x = common + torch.randn(N, common.shape[1], generator=source)
    flat = torch.cat([w.flatten() for w in weights])
    accumulator = GradientAccumulator(1, weights, halves_on=SAMPLED)
    accumulator.add(x @ flat, None, torch.ones(N, 1), as_halves("even"))
    found = accumulator.finish().half_gram
    first, second = x[: N // 2].mean(0).double(), x[N // 2 :].mean(0).double()
    assert float(found[0, 1, 0, 0]) == pytest.approx(float(first @ second), rel=0.06)
    assert float(found[0, 0, 0, 0]) == pytest.approx(float(first @ first), rel=0.06)


@pytest.mark.parametrize("only", [0, 1])
def test_one_half_alone_has_no_products_of_halves(only):
    model = Model()
    slope, base = model()
    halves = torch.full((N,), only)
    found = reward_gradients(slope, base, model.advantages, model.params, halves=halves)
    assert found.cross is None
    assert found.half_gram is None
    torch.testing.assert_close(found.g[1], model.column(1), **EXACT)


@pytest.mark.parametrize("split", ["even", "interleaved", "unequal"])
@pytest.mark.parametrize("sizes", [[1] * 12, [3] * 4, [5, 1, 6], [4, 4, 4], [11, 1]], ids=str)
def test_micro_batches_add_up_to_the_batch(sizes, split):
    """Whether or not a micro-batch straddles the halves."""
    model = Model()
    halves = as_halves(split)
    slope, base = model()
    whole = reward_gradients(slope, base, model.advantages, model.params, halves=halves)

    pieces = GradientAccumulator(J, model.params)
    for rows in torch.arange(N).split(sizes):
        slope, base = model(rows)
        pieces.add(slope, base, model.advantages[rows], halves[rows])
    found = pieces.finish()
    for name in ("g", "shared", "norms", "gram", "cross", "half_gram"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-10, atol=1e-14)


def test_every_timestep_is_a_row():
    """Two passes over the same samples average, they do not add."""
    model = Model()
    once, twice = GradientAccumulator(J, model.params), GradientAccumulator(J, model.params)
    for accumulator, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            slope, base = model()
            accumulator.add(slope, base, model.advantages)
    torch.testing.assert_close(once.finish().g, twice.finish().g, **EXACT)


@pytest.mark.parametrize("split", ["none", "unequal"])
def test_no_columns(split):
    """An ordinary step: only the shared part."""
    model = Model()
    slope, base = model()
    found = reward_gradients(slope, base, model.advantages[:, :0], model.params, halves=as_halves(split))
    assert found.g.shape == (0, len(found.shared))
    assert found.gram.shape == (0, 0)
    torch.testing.assert_close(found.shared, model.flat_gradient(model()[1].mean()), **EXACT)


def test_combined_advantage_inside_base():
    """How a step between refreshes runs: no columns, base already holds A_bar * slope."""
    model = Model()
    alpha = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    slope, base = model()
    step = GradientAccumulator(0, model.params)
    step.add(None, base + (model.advantages @ alpha) * slope, None)
    separate = reward_gradients(*model(), model.advantages, model.params)
    torch.testing.assert_close(step.finish().shared, separate.shared + alpha @ separate.g, **EXACT)


def test_without_base_nothing_is_shared():
    model = Model()
    found = reward_gradients(model()[0], None, model.advantages, model.params)
    assert (found.shared == 0).all()
    torch.testing.assert_close(found.g[0], model.column(0), **EXACT)


@pytest.mark.parametrize("method", METHODS)
def test_probe_columns_are_linear(method):
    """A further column, the sum of two others, has the sum of their gradients and leaves the rest alone."""
    model = Model()
    plain = reward_gradients(*model(), model.advantages, model.params, halves=as_halves("even"), method=method)
    probe = 2 * model.advantages[:, 0] - model.advantages[:, 3]
    columns = torch.cat([model.advantages, probe[:, None]], dim=1)
    found = reward_gradients(*model(), columns, model.params, halves=as_halves("even"), method=method)
    torch.testing.assert_close(found.g[:J], plain.g, **EXACT)
    torch.testing.assert_close(found.cross[:J, :J], plain.cross, **EXACT)
    torch.testing.assert_close(found.half_gram[:, :, :J, :J], plain.half_gram, **EXACT)
    torch.testing.assert_close(found.g[J], 2 * plain.g[0] - plain.g[3], **EXACT)


@pytest.mark.parametrize("method", METHODS)
def test_masked_columns(method):
    """A column of zeros has a gradient of exactly zero; rows without any advantage still count in the mean."""
    model = Model()
    model.advantages[8:10] = 0.0
    model.advantages[:, 1] = 0.0
    model.advantages[:6, 2] = 0.0
    found = reward_gradients(*model(), model.advantages, model.params, halves=as_halves("even"), method=method)
    assert (found.g[1] == 0).all()
    assert found.norms[1] == 0
    assert (found.gram[1] == 0).all()
    assert (found.cross[1] == 0).all()
    assert (found.half_gram[:, :, 1] == 0).all()
    for j in (0, 2, 3):
        torch.testing.assert_close(found.g[j], model.column(j), **EXACT)
    assert found.cross[2, 2] == 0
    assert found.cross[2, 0] != 0


def test_unused_parameter_has_no_gradient():
    model = Model()
    found = reward_gradients(*model(), model.advantages, model.params)
    start = model.params[0].numel() + model.params[1].numel()
    assert (found.g[:, start : start + 4] == 0).all()
    assert (found.g[:, :start] != 0).any()


def test_parameters_and_their_grad_are_left_alone():
    model = Model()
    before = [p.detach().clone() for p in model.params]
    advantages = model.advantages.requires_grad_()
    reward_gradients(*model(), advantages, model.params)
    assert all(p.grad is None for p in model.params)
    assert advantages.grad is None
    assert all(torch.equal(p, b) for p, b in zip(model.params, before, strict=True))


def test_float32_parameters_have_float64_products():
    model, exact = Model(torch.float32), Model()
    found = reward_gradients(*model(), model.advantages, model.params, halves=as_halves("even"))
    expected = reward_gradients(*exact(), exact.advantages, exact.params, halves=as_halves("even"))
    assert found.g.dtype == torch.float32
    for name in ("norms", "gram", "cross"):
        assert getattr(found, name).dtype == torch.float64
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    # Of the sums behind g, before they are rounded to its dtype.
    torch.testing.assert_close(found.gram, found.g.double() @ found.g.double().T, rtol=1e-6, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("ones", [2, 3])
def test_cross_products_are_unbiased(ones):
    """With slope_i = w . x_i, x ~ N(mu, I), column 0 all ones and column 1 the first coordinate of x:
    mu_0 = mu and mu_1 = mu_(1) mu + e_1. The Gram matrix is too large by the noise, |x - mu|^2 / N = P / N."""
    p, n, trials = 3, 4, 1500
    mu = torch.tensor([0.6, -0.4, 0.2], dtype=torch.float64)
    means = torch.stack([mu, mu[0] * mu + torch.eye(p, dtype=torch.float64)[0]])
    source = torch.Generator().manual_seed(ones)
    w = torch.zeros(p, dtype=torch.float64, requires_grad=True)
    halves = torch.tensor([1] * ones + [0] * (n - ones))
    cross, gram = [], []
    for x in mu + torch.randn(trials, n, p, generator=source, dtype=torch.float64):
        advantages = torch.stack([torch.ones(n, dtype=torch.float64), x[:, 0]], dim=1)
        found = reward_gradients(x @ w, None, advantages, [w], halves=halves)
        cross.append(found.cross)
        gram.append(found.gram)
    cross, gram = torch.stack(cross), torch.stack(gram)
    error = cross.std(0) / trials**0.5
    assert ((cross.mean(0) - means @ means.T).abs() < 4 * error).all()
    assert float(gram[:, 0, 0].mean()) == pytest.approx(float(mu @ mu) + p / n, rel=0.1)


@pytest.mark.parametrize(
    ("slope", "advantages", "options"),
    [
        ((N, 1), (N, J), {}),
        ((N,), (N,), {}),
        ((N,), (N - 1, J), {}),
        ((N,), (N, J), {"method": "guess"}),
        ((N,), (N, J), {"halves": torch.zeros(1, dtype=torch.long)}),
        ((N,), (N, J), {"halves": torch.zeros(N - 1, dtype=torch.long)}),
        ((N,), (N, J), {"halves": torch.arange(N)}),
    ],
    ids=[
        "slope not flat",
        "advantages flat",
        "fewer advantages",
        "unknown method",
        "one half label",
        "fewer half labels",
        "labels beyond 1",
    ],
)
def test_bad_input_is_refused(slope, advantages, options):
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=r"must be"):
        reward_gradients(weight * torch.ones(slope), None, torch.ones(advantages), [weight], **options)


@pytest.mark.parametrize("columns", [J - 1, J + 1])
def test_micro_batch_with_other_columns_is_refused(columns):
    model = Model()
    with pytest.raises(ValueError, match=r"must be"):
        GradientAccumulator(J, model.params).add(*model(), torch.ones(N, columns))


def test_nothing_added():
    model = Model()
    accumulator = GradientAccumulator(J, model.params)
    with pytest.raises(ValueError):
        accumulator.add(None, None, None)
    with pytest.raises(ValueError, match="no rows"):
        accumulator.finish()


def test_an_accumulator_serves_once():
    """Its memory is the result's: adding to it would change gradients that somebody holds."""
    model = Model()
    accumulator = GradientAccumulator(J, model.params)
    slope, base = model()
    accumulator.add(slope, base, model.advantages)
    found = accumulator.finish()
    kept = found.g.clone()
    with pytest.raises(ValueError, match="make a new one"):
        accumulator.add(*model(), model.advantages)
    with pytest.raises(ValueError, match="no rows"):
        accumulator.finish()
    assert torch.equal(found.g, kept)
