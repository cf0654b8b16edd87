"""The NFT loss against docs/method.md, section 2, and Proposition 1 (section 3, point 7) through autograd."""

import pytest
import torch

from marble_rl import Harmonizer, nft_loss
from marble_rl.losses.base import reference_divergence
from reference import nft_gradient, nft_losses

ADVANTAGES = torch.tensor([-9.0, -5.0, -1.7, 0.0, 0.3, 4.999, 5.0, 80.0], dtype=torch.float64)
SHAPES = [(4, 6, 5), (2, 3, 4, 4)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def latents(shape, dtype=torch.float64, seed=0):
    """v_theta, v_old, x0, x_t, t for each of ADVANTAGES; the old policy is near the trained one, as in training."""
    source = torch.Generator().manual_seed(seed)
    n = len(ADVANTAGES)
    x0, noise, v_old, step = torch.randn(4, n, *shape, generator=source, dtype=torch.float64)
    t = torch.linspace(0.02, 1.0, n, dtype=torch.float64)
    time = t.view(n, *[1] * len(shape))
    x_t = (1 - time) * x0 + time * noise
    return [x.to(dtype) for x in (v_old + 0.3 * step, v_old, x0, x_t, t)]


def clamped(advantages, clip=5.0):
    return advantages.clamp(-clip, clip)


def relative_error(found, expected):
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("beta", "clip"), [(1.0, 5.0), (0.1, 5.0), (0.1, 2.0)])
def test_value_and_gradient_match_the_reference(beta, clip, shape, dtype):
    inputs = latents(shape, dtype)
    v_theta = inputs[0].requires_grad_()
    loss = nft_loss(*inputs, beta=beta, adv_clip=clip)
    assert loss.base.shape == loss.slope.shape == (len(ADVANTAGES),)
    assert loss.base.dtype == loss.slope.dtype == dtype

    total = loss.base + clamped(ADVANTAGES, clip).to(dtype) * loss.slope
    exact = [x.detach().double() for x in inputs]
    expected = nft_losses(*exact, ADVANTAGES, beta=beta, adv_clip=clip)
    assert relative_error(total.detach(), expected) < TOLERANCE[dtype]

    (gradient,) = torch.autograd.grad(total.sum(), v_theta)
    for i, by_hand in enumerate(nft_gradient(*exact, ADVANTAGES, beta=beta, adv_clip=clip)):
        assert relative_error(gradient[i], by_hand) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_reference_gradients_agree_with_each_other(beta):
    inputs = latents(SHAPES[0])
    v_theta = inputs[0].requires_grad_()
    (automatic,) = torch.autograd.grad(nft_losses(*inputs, ADVANTAGES, beta=beta).sum(), v_theta)
    exact = [x.detach() for x in inputs]
    torch.testing.assert_close(automatic, nft_gradient(*exact, ADVANTAGES, beta=beta), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_base_and_slope_are_the_loss_at_the_ends(beta, shape):
    """base is the loss at A = 0, slope the difference quotient between the two clamps."""
    inputs = latents(shape)
    loss = nft_loss(*inputs, beta=beta)
    at = {a: nft_losses(*inputs, [a] * len(ADVANTAGES), beta=beta) for a in (-5.0, 0.0, 5.0)}
    torch.testing.assert_close(loss.base, at[0.0], rtol=1e-12, atol=0)
    torch.testing.assert_close(loss.slope, (at[5.0] - at[-5.0]) / 10, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_predictions_are_compared_in_float32(dtype):
    inputs = latents(SHAPES[0], dtype)
    loss = nft_loss(*inputs, beta=0.1)
    assert loss.base.dtype == torch.float32
    expected = nft_losses(*[x.double() for x in inputs], ADVANTAGES, beta=0.1)
    found = loss.base + clamped(ADVANTAGES).float() * loss.slope
    assert relative_error(found, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("x0", "sign"), [(-0.5, 1.0), (2.0, -1.0)])
def test_adaptive_weight_is_detached(x0, sign):
    """One pixel, beta 1: L+ = e^2 / |e| with e = x_t - t v - x0, so dL+/dv = -2 t sign(e); without the detach, half."""
    v_theta = torch.zeros(1, 1, 1, 1, dtype=torch.float64, requires_grad=True)
    v_old = torch.zeros_like(v_theta)
    pixel = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    t = torch.tensor([0.5], dtype=torch.float64)
    loss = nft_loss(v_theta, v_old, x0 * pixel, 0 * pixel, t, beta=1.0)
    positive = loss.base / 5 + loss.slope
    (gradient,) = torch.autograd.grad(positive.sum(), v_theta)
    assert gradient.item() == pytest.approx(-2 * 0.5 * sign)
    assert positive.item() == pytest.approx(abs(x0))


@pytest.mark.parametrize("error", [0.0, 1e-7, 1e-3])
def test_weight_has_a_floor(error):
    """A mean error below 1e-5 is divided by 1e-5: no infinite gradients at a perfect prediction."""
    _, _, x0, x_t, t = latents(SHAPES[0])
    v = (x_t - x0) / t.view(-1, 1, 1, 1)
    offset = error / t.view(-1, 1, 1, 1)
    found = nft_loss(v - offset, v - offset, x0, x_t, t, beta=1.0)
    expected = 5 * error**2 / max(error, 1e-5)
    torch.testing.assert_close(found.base, torch.full_like(t, expected), rtol=1e-6, atol=1e-12)


def test_base_has_no_gradient_on_policy():
    inputs = latents(SHAPES[0])
    inputs[0] = inputs[1].clone().requires_grad_()
    loss = nft_loss(*inputs, beta=0.1)
    base, slope = (torch.autograd.grad(x.sum(), inputs[0], retain_graph=True)[0] for x in (loss.base, loss.slope))
    assert slope.norm() > 1e-3
    assert base.norm() < 1e-10 * slope.norm()


def test_old_policy_gets_no_gradient():
    inputs = latents(SHAPES[0])
    v_theta, v_old = inputs[0].requires_grad_(), inputs[1].requires_grad_()
    loss = nft_loss(*inputs, beta=0.1)
    gradients = torch.autograd.grad((loss.base + loss.slope).sum(), [v_theta, v_old], allow_unused=True)
    assert gradients[0].norm() > 0
    assert gradients[1] is None


def test_reference_divergence_is_the_mean_squared_difference():
    v_theta, v_ref, *_ = latents(SHAPES[1])
    v_theta.requires_grad_()
    v_ref.requires_grad_()
    divergence = reference_divergence(v_theta, v_ref)
    for i, value in enumerate(divergence.tolist()):
        assert value == pytest.approx(float((v_theta[i] - v_ref[i]).detach().square().mean()), rel=1e-12)
    gradients = torch.autograd.grad(divergence.sum(), [v_theta, v_ref], allow_unused=True)
    torch.testing.assert_close(gradients[0], 2 * (v_theta - v_ref).detach() / v_ref[0].numel())
    assert gradients[1] is None


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize(("spread", "clamps"), [(1.0, False), (6.0, True)])
def test_proposition_1(spread, clamps, beta):
    """The gradient under the combined advantage is the alpha_bar combination of the gradients under each A_k."""
    source = torch.Generator().manual_seed(3)
    harmonizer = Harmonizer(["a", "b", "c"])
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.4, 0.0], [-0.5, 0.2, 1.0]], dtype=torch.float64)
    alpha_bar = harmonizer.refresh(rows @ rows.T).alpha_bar
    assert alpha_bar.std() > 0.02

    _, v_old, x0, x_t, t = latents(SHAPES[0])
    advantages = spread * torch.randn(len(x0), 3, generator=source, dtype=torch.float64)
    assert bool((advantages.abs() > 5).any()) == clamps
    weights = torch.randn(2, *x0.shape[1:], generator=source, dtype=torch.float64).requires_grad_()

    def predict():
        return v_old + 0.2 * torch.tanh(weights[0] * x_t + weights[1])

    def separate(k):
        loss = nft_losses(predict(), v_old, x0, x_t, t, advantages[:, k], beta=beta).mean()
        return torch.autograd.grad(loss, weights)[0]

    combined = harmonizer.combine(advantages)
    loss = nft_loss(predict(), v_old, x0, x_t, t, beta=beta)
    (found,) = torch.autograd.grad((loss.base + combined * loss.slope).mean(), weights)
    expected = sum(alpha_bar[k] * separate(k) for k in range(3))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    late_clamp = (advantages @ alpha_bar).clamp(-5, 5)
    assert torch.allclose(late_clamp, combined) != clamps
